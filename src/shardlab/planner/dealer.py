"""What works out a search's shapes and pipelines: by itself, or many at a time in another process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shardlab.planner.dealing import Dealt, deal
from shardlab.planner.floors import Floors
from shardlab.planner.pipeline_floors import LaidPipelines
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Problem
from shardlab.planner.shape_pipelines import pipelined
from shardlab.planner.waiting import Waiting
from shardlab.program.world import gc_paused
from shardlab.strategies.plan import Plan

Change = Literal["", "memory", "links", "batch"]
"""A doubling that the planner tries on a problem: of each device's memory, of the bandwidth between nodes, or of the
global batch ("": none)."""


@dataclass(frozen=True)
class AskedDeal:
    """A question to a worker: which candidates of shapes and pipelines may be faster than what is known.

    Attributes:
        waiting: the shapes and pipelines.
        least: seconds above which a floor discards a candidate.
        change: in a problem that is changed.
    """

    waiting: Sequence[Waiting]
    least: float
    change: Change = ""


@dataclass
class Deals:
    """Candidates that may be faster than what is known.

    Attributes:
        candidates: these.
        seen: how many there were of which more than their pipeline's floors was asked.
    """

    candidates: list[Waiting] = field(default_factory=list[Waiting])
    seen: int = 0


class Dealer:
    """Works out the shapes and pipelines of a problem, with their floors."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.floors = Floors(problem)
        self._pipelined: dict[PlanShape, LaidPipelines | None] = {}

    @gc_paused()  # floors stay, and walking them again and again would cost a fifth
    def pipelines(self, waiting: Waiting, least: float) -> Iterator[Waiting]:
        """Every pipeline of a shape whose floor is no more than so many seconds."""
        shape = waiting.shape
        alike = replace(shape, micro_batch_size=1, precision=self.problem.precisions[0])
        if alike not in self._pipelined:
            plans = list(pipelined(self.problem, shape))
            self._pipelined[alike] = self.floors.pipelines.laid(shape, plans) if plans else None
        if (laid := self._pipelined[alike]) is None:
            return iter(())
        all = self.floors.pipelines.seconds(shape, laid)
        sharing, floors = waiting.guess - waiting.passes, self.floors.least(shape, all)

        def pipeline(place: int) -> Waiting:
            seconds, passes = max(waiting.seconds, float(floors[place])), float(all[place])
            return waiting._replace(seconds=seconds, guess=passes + sharing, plan=laid.plans[place], passes=passes)

        return map(pipeline, np.flatnonzero(floors <= least).tolist())

    @gc_paused()
    def deal(self, waiting: Waiting, *, least: float, whole: bool) -> tuple[Dealt, list[Waiting]]:
        """Deal a pipeline's candidates, as `deal` does; and let them wait."""
        shape, plan = waiting.shape, waiting.plan
        assert isinstance(plan, Plan), "a pipeline has candidates"
        dealt = deal(self.floors, shape, plan, waiting.passes, least=least, whole=whole)
        return dealt, [Waiting(0.0, 0, *each[1:], shape, each.candidate, timed=whole) for each in dealt.candidates]

    def all(self, asked: AskedDeal) -> Deals:
        """Deal the candidates of many shapes and pipelines."""
        deals = Deals()
        for each in asked.waiting:
            for waiting in [each] if each.plan else self.pipelines(each, asked.least):
                if waiting.seconds <= asked.least:
                    dealt, candidates = self.deal(waiting, least=asked.least, whole=True)
                    deals.seen += dealt.seen
                    deals.candidates += candidates
        return deals
