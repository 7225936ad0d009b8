"""Every candidate with a pipeline, with its floors; the cheapest floors first, so that they discard most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

import numpy as np

from shardlab.errors import UserError
from shardlab.planner.families import family, model_kinds
from shardlab.planner.floors import Floors
from shardlab.planner.problem import Candidate
from shardlab.planner.sharing_floors import shared_as
from shardlab.planner.space import PlanShape, legal
from shardlab.strategies.plan import Plan

TooLarge = Callable[[Candidate, float], None]
"""Is told of a candidate that does not fit, and its floor of bytes."""


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
        open: whether some that may fit are too slow.
    """

    candidates: list[DealtCandidate] = field(default_factory=list[DealtCandidate])
    seen: int = 0
    open: bool = False


def deal(
    floors: Floors,
    shape: PlanShape,
    plan: Plan,
    passes: float,
    *,
    least: float,
    whole: bool,
    open: bool,
    nearer: Callable[[str, float], bool],
    too_large: TooLarge,
) -> Dealt:
    """Deal a pipeline's candidates.

    Args:
        floors: of the problem.
        shape, plan: the pipeline.
        passes: seconds of its passes alone, at least.
        least: seconds above which a floor discards a candidate.
        whole: whether floors of the whole step are wanted; else its order of work is left out.
        open: whether it is known that some candidates of this kind of parallelism may fit and are too slow. Then nobody
            wants to know what does not fit.
        nearer: whether so many bytes are less than those of all of a family that do not fit.
        too_large: is told of what does not fit.
    """
    dealt = Dealt(open=open)
    problem, name, room = floors.problem, model_kinds(shape.mesh), floors.problem.room
    if not floors.follows(shape, plan):
        return dealt
    ways, bytes = floors.ways(shape), floors.bytes_of_ways(shape, plan)
    fits, seconds = bytes <= room, ways.seconds(passes)

    def held(candidate: Candidate) -> float:
        """A candidate's floor of bytes (inf: it does not fit)."""
        if (found := floors.memory.of(shape, candidate)) <= room:
            return found
        too_large(candidate, found)
        return inf

    def pipeline_fits() -> bool:
        if (wanted := floors.memory.of_pipeline(shape, plan, room)) <= room:
            return True
        too_large(Candidate(plan, shape.micro_batch_size, shape.precision), wanted)
        return False

    def may_be_best() -> bool:
        """Whether any that fits is fast enough; those that are not are left open."""
        dealt.open = dealt.open or bool((seconds[fits] > least).any())
        return bool((fits & (seconds <= least)).any())

    if (wanted := np.flatnonzero(fits & (seconds <= least))).size:
        if not open and not pipeline_fits():
            return dealt
        seconds[wanted] = np.maximum(seconds[wanted], floors.seconds_of_ways(shape, plan, wanted))
        if may_be_best() and whole:
            if open and not pipeline_fits():
                return dealt
            passes = max(passes, floors.steps.of_pipeline(shape, plan))
            seconds = np.maximum(seconds, ways.seconds(passes))
    may_be_best()
    made: list[tuple[Candidate, float, float]] = []
    for place in np.flatnonzero((seconds <= least) & (fits | (not dealt.open))).tolist():
        way = ways.plans[place]
        if not fits[place] and not nearer(name or family(way), float(bytes[place])):
            continue
        try:
            candidate = legal(problem, shape, shared_as(plan, way))
        except UserError:
            continue
        if candidate is None:
            continue
        dealt.seen += 1
        if fits[place]:
            made.append((candidate, float(seconds[place]), passes + float(ways.sharing[place])))
        else:
            held(candidate)
    if made and whole:
        floors.steps.follow(shape, [candidate for candidate, *_ in made])
    for candidate, floor, guess in made:
        if whole:
            floor = guess = max(floor, floors.seconds(shape, candidate))
            if floor > least:
                dealt.open = dealt.open or held(candidate) < inf
                continue
        if (kept := held(candidate)) < inf:
            dealt.candidates.append(DealtCandidate(candidate, floor, kept, guess))
    return dealt
