"""What works out a search's shapes and pipelines: by itself, or many at a time in another process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from shardlab.planner.dealing import Dealt, TooLarge, deal
from shardlab.planner.families import family
from shardlab.planner.floors import Floors
from shardlab.planner.pipeline_floors import LaidPipelines
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.space import PlanShape, as_fixed, pipelined
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
        open: kinds of parallelism of which it is known that some candidates may fit and are too slow.
        too_large: of each family, the least bytes of those that do not fit.
        change: in a problem that is changed.
    """

    waiting: Sequence[Waiting]
    least: float
    open: frozenset[str]
    too_large: Mapping[str, float]
    change: Change = ""


@dataclass
class Deals:
    """Candidates that may be faster than what is known.

    Attributes:
        candidates: these.
        seen: how many there were of which more than their pipeline's floors was asked.
        open: kinds of parallelism of which some candidates may fit and are too slow.
        too_large: of each family, the candidate with the lowest floor of bytes that does not fit, and that floor.
    """

    candidates: list[Waiting] = field(default_factory=list[Waiting])
    seen: int = 0
    open: set[str] = field(default_factory=set[str])
    too_large: dict[str, tuple[float, Candidate]] = field(default_factory=dict[str, tuple[float, Candidate]])


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
    def deal(
        self,
        waiting: Waiting,
        *,
        least: float,
        whole: bool,
        open: bool,
        nearer: Callable[[str, float], bool],
        too_large: TooLarge,
    ) -> tuple[Dealt, list[Waiting]]:
        """Deal a pipeline's candidates, as `deal` does; and let them wait."""
        shape, plan = waiting.shape, waiting.plan
        assert isinstance(plan, Plan), "a pipeline has candidates"
        dealt = deal(
            self.floors,
            shape,
            plan,
            waiting.passes,
            least=least,
            whole=whole,
            open=open,
            nearer=nearer,
            too_large=too_large,
        )
        return dealt, [Waiting(0.0, 0, *each[1:], shape, each.candidate, timed=whole) for each in dealt.candidates]

    def all(self, asked: AskedDeal) -> Deals:
        """Deal the candidates of many shapes and pipelines."""
        deals, known = Deals(open=set(asked.open)), dict(asked.too_large)

        def nearer(name: str, bytes: float) -> bool:
            return name not in known or bytes < known[name]

        def note(candidate: Candidate, bytes: float) -> None:
            candidate = as_fixed(self.problem, candidate)
            if nearer(name := family(candidate.plan), bytes):
                known[name] = bytes
                deals.too_large[name] = bytes, candidate

        for each in asked.waiting:
            for waiting in [each] if each.plan else self.pipelines(each, asked.least):
                name = waiting.kinds
                if waiting.seconds > asked.least:
                    deals.open.add(name)
                    continue
                dealt, candidates = self.deal(
                    waiting, least=asked.least, whole=True, open=name in deals.open, nearer=nearer, too_large=note
                )
                deals.seen += dealt.seen
                deals.open |= {name} if dealt.open else set()
                deals.candidates += candidates
        return deals
