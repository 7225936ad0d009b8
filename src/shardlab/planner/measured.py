"""Measured steps of plans that were run, and why some are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from shardlab.errors import UserError
from shardlab.planner.families import family
from shardlab.planner.found import PlanOutcome
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.words import short
from shardlab.planner.workers import Ask, Asked

FARTHEST = 10
"""How many times longer or shorter than predicted a step may be said to take: what is further off has another unit."""


@dataclass(frozen=True)
class MeasuredStep:
    """A plan that was run.

    Attributes:
        candidate: which.
        seconds: of a step (None: it ran out of memory).
        source: the file or folder that says so.
        by_hand: whether somebody has written the seconds, maybe in another unit; a run's own record is in seconds.
    """

    candidate: Candidate
    seconds: float | None
    source: str
    by_hand: bool = False


MeasuredOutcome = tuple[PlanOutcome, float]
"""A plan as predicted, and the seconds of a step that were measured."""


def ran_out(measured: Sequence[MeasuredStep]) -> frozenset[Candidate]:
    """Plans that have run out of memory, whatever they took where they had not."""
    return frozenset(each.candidate for each in measured if each.seconds is None)


def measured_outcomes(problem: Problem, measured: Sequence[MeasuredStep], ask: Ask) -> list[MeasuredOutcome]:
    """Forecasts of plans that were measured and fit, and the seconds of a step; of several measurements the median.

    Raises:
        UserError: when a plan is not one that the problem has, or a time is so far off that its unit must be another.
    """
    candidates = [each.candidate for each in measured if _is_of(problem, each)]
    coming = {each: ask(Asked(each)) for each in candidates if each not in ran_out(measured)}
    found: list[MeasuredOutcome] = []
    for candidate, future in coming.items():
        own = [(each.seconds, each.source) for each in measured if each.candidate == candidate and each.seconds]
        if (answer := future.result()) is None:
            raise UserError(
                f"{own[0][1]}: this plan is none that {problem.recipe.name} runs on {problem.cluster}; leave it out"
            )
        for step in (each for each in measured if each.candidate == candidate):
            _want_seconds(step, answer.forecast.seconds)
        found.append((PlanOutcome(candidate, answer.forecast), median(seconds for seconds, _ in own)))
    return found


def _is_of(problem: Problem, step: MeasuredStep) -> bool:
    """See that a measured plan is one of a problem's.

    Raises:
        UserError: saying why it is not.
    """
    plan, limits, source = step.candidate.plan, problem.limits, step.source
    ranks, devices, size = plan.mesh.world, problem.cluster.size, step.candidate.micro_batch_size
    if ranks != devices:
        raise UserError(f"{source} was measured on {ranks} ranks, and the plan is for {devices}; leave it out")
    if problem.sequences % (plan.data_ranks * size):
        raise UserError(
            f"{source}: {plan.data_ranks} data-parallel ranks with microbatches of {size} cannot share "
            f"{problem.sequences} sequences; leave it out, or give its --global-batch"
        )
    if not limits.allow(plan) or not limits.allows("micro_batch_size", size):
        raise UserError(f"{source} is a plan that the limits {limits} leave out; give other limits, or leave it out")
    if step.candidate.precision not in problem.precisions:
        name = step.candidate.precision.name
        raise UserError(f"{source} was measured in {name}; add it to --precision, or leave it out")
    return True


def _want_seconds(step: MeasuredStep, predicted: float) -> None:
    """Refuse a time that somebody wrote and that cannot be in seconds.

    Raises:
        UserError: with the plan, and with both times.
    """
    if step.by_hand and step.seconds and not 1 / FARTHEST <= step.seconds / predicted <= FARTHEST:
        plan = f"{family(step.candidate.plan)}, {short(step.candidate)}"
        raise UserError(
            f"{step.source}: {plan} is said to take {step.seconds:g} s, and {predicted:.3g} s are predicted, more than "
            f"{FARTHEST} times off; is it in seconds? give those of one step, or leave it out"
        )
