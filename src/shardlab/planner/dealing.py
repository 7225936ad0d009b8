"""Every candidate with a pipeline, with its floors; the cheapest floors first, so that they discard most."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from shardlab.errors import UserError
from shardlab.planner.floors import Floors
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.sharing_floors import shared_as
from shardlab.planner.space import legal
from shardlab.strategies.plan import Plan


class DealtCandidate(NamedTuple):
    """A candidate that may fit, and may be fast enough.

    Attributes:
        candidate: which.
        seconds, bytes: its floors.
        guess: seconds, if nothing ran beside passes.
    """

    candidate: Candidate
    seconds: float
    bytes: float
    guess: float


@dataclass
class Dealt:
    """What a pipeline's candidates are.

    Attributes:
        candidates: those that are left.
        seen: how many there were of which more than their pipeline's floors was asked.
    """

    candidates: list[DealtCandidate] = field(default_factory=list[DealtCandidate])
    seen: int = 0


def deal(floors: Floors, shape: PlanShape, plan: Plan, passes: float, *, least: float, whole: bool) -> Dealt:
    """Deal a pipeline's candidates that may fit.

    Args:
        floors: of the problem.
        shape, plan: the pipeline.
        passes: seconds of its passes alone, at least.
        least: seconds above which a floor discards a candidate.
        whole: whether floors of the whole step are wanted; else its order of work is left out.
    """
    dealt, problem = Dealt(), floors.problem
    if not floors.follows(shape, plan):
        return dealt
    ways = floors.ways(shape)
    fits, seconds = floors.bytes_of_ways(shape, plan) <= problem.room, ways.seconds(passes)
    if not (wanted := np.flatnonzero(fits & (seconds <= least))).size:
        return dealt
    seconds[wanted] = np.maximum(seconds[wanted], floors.seconds_of_ways(shape, plan, wanted))
    if not (fits & (seconds <= least)).any() or floors.memory.of_pipeline(shape, plan, problem.room) > problem.room:
        return dealt
    if whole:
        passes = max(passes, floors.steps.of_pipeline(shape, plan))
        seconds = np.maximum(seconds, ways.seconds(passes))
    made: list[tuple[Candidate, float, float]] = []
    for place in np.flatnonzero(fits & (seconds <= least)).tolist():
        try:
            candidate = legal(problem, shape, shared_as(plan, ways.plans[place]))
        except UserError:
            continue
        if candidate is not None:
            made.append((candidate, float(seconds[place]), passes + float(ways.sharing[place])))
    dealt.seen = len(made)
    if made and whole:
        floors.timed.follow(shape, [candidate for candidate, *_ in made])
    for candidate, floor, guess in made:
        if whole:
            floor = guess = max(floor, floors.seconds(shape, candidate))
        if floor <= least and (kept := floors.memory.of(shape, candidate)) <= problem.room:
            dealt.candidates.append(DealtCandidate(candidate, floor, kept, guess))
    return dealt
