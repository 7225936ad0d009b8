"""Alternatives to a plan: of each of its choices the nearest other one, and what is predicted of that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from shardlab.planner.found import PlanOutcome
from shardlab.planner.in_time import InTime
from shardlab.planner.neighbours import MODEL_AXES, Topic, neighbours
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.workers import Answer, Asked


@dataclass(frozen=True)
class Alternative:
    """A plan that differs in one choice.

    Attributes:
        topic: what the choice is about.
        choice: which, in words: `tp 4 instead of 8`.
        candidate: the plan.
        answer: its forecast, and what its step's time goes to (None: the code that runs plans does not accept it).
        better: the fastest plan found with as many ranks along that axis, where that is another one (None: none is).
    """

    topic: Topic
    choice: str
    candidate: Candidate
    answer: Answer | None
    better: PlanOutcome | None = None


def nearest(
    problem: Problem, chosen: Candidate, timed: InTime, fitting: Sequence[PlanOutcome] = ()
) -> list[Alternative]:
    """The nearest alternative of each choice, forecast; those that cannot be run are left out.

    Args:
        fitting: plans that were found, fastest first.
    """
    near = [each for each in neighbours(problem, chosen) if problem.limits.allow(each[2].plan)]
    coming = [(*each, timed.ask(Asked(each[2]))) for each in near]
    found = [
        Alternative(topic, choice, other, timed.answer(future, "an alternative"), better_than(other, chosen, fitting))
        for topic, choice, other, future in coming
    ]
    return [each for each in found if each.answer is not None]


def better_than(other: Candidate, chosen: Candidate, fitting: Sequence[PlanOutcome]) -> PlanOutcome | None:
    """The fastest plan with as many ranks as an alternative along the axis that it names (None: it is that, or names
    none)."""
    one, mesh = chosen.plan.mesh, other.plan.mesh
    axis = next((axis for axis in MODEL_AXES if getattr(mesh, axis) != getattr(one, axis)), None)
    if axis is None:
        return None
    alike = (each for each in fitting if getattr(each.candidate.plan.mesh, axis) == getattr(mesh, axis))
    found = next(alike, None)
    return found if found and found.candidate != other else None


def explained(near: Sequence[Alternative], timed: InTime) -> Callable[[], list[Alternative]]:
    """Ask what the time of alternatives' steps goes to; what is given back waits for the answers, and adds them."""
    coming = [
        timed.ask(Asked(each.candidate, each.answer.forecast, shares=True)) for each in near if each.answer is not None
    ]
    return lambda: [
        replace(each, answer=timed.answer(future, "why an alternative differs") or each.answer)
        for each, future in zip(near, coming, strict=True)
    ]
