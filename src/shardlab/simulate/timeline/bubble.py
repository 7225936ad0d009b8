"""Bubble of a pipeline: the share of the time from a rank's first to its last pass in which it waits for other ranks.

The bubble is a property of the schedule, so `schedule_bubble` computes it as if communication took no time. For GPipe
and 1F1B with p equal stages and m microbatches it is (p - 1) / (m + p - 1). `bubble` computes the share for a timeline,
in which passes also wait for messages and collectives. The difference of the two shares is due to communication.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shardlab.language import Group, Kind, Op, OpKind, Sizes, Spec
from shardlab.simulate.timeline.prices import Messages, Prices, Traced
from shardlab.simulate.timeline.run import Clocks
from shardlab.simulate.timeline.timeline import Timeline


def schedule_bubble(traced: Traced, prices: Prices) -> float:
    """Return the bubble of a program, from 0 to 1: the result of `bubble` if communication takes no time."""
    times = Clocks(traced, FreeCommunication(prices)).run()
    return _share(
        ((op.kind, start, end) for op, start, end in zip(tape, starts, ends, strict=True))
        for tape, starts, ends in zip(traced.program.tapes, times.starts, times.ends, strict=True)
    )


def bubble(timeline: Timeline) -> float:
    """Return (cost - work) / cost of a timeline, from 0 to 1 (Qi et al. 2023, arXiv 2401.10241, section 5.3).

    The cost is the time from the start of a rank's first pass to the end of its last, on the rank where it is longest.
    The work is the time of all passes on the busiest rank. If all ranks have equal work, it is m (F + B + W) for m
    microbatches, whose forward pass and two halves of the backward pass take F, B and W. Updates and communication only
    count while passes wait for them.
    """
    return _share(((event.kind, event.start, event.end) for event in events) for events in timeline.events)


_PASSES = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT})


def _share(ranks: Iterable[Iterable[tuple[OpKind, float, float]]]) -> float:
    cost = work = 0.0
    for ops in ranks:
        passes = [(start, end) for kind, start, end in ops if kind in _PASSES]
        if passes:
            cost = max(cost, max(end for _, end in passes) - min(start for start, _ in passes))
            work = max(work, sum(end - start for start, end in passes))
    return round((cost - work) / cost, 9) if cost else 0.0


@dataclass(frozen=True)
class FreeCommunication(Prices):
    """Prices with the compute times of other prices, free communication, and sends that do not wait for their receives.

    Attributes:
        prices: the other prices.
    """

    prices: Prices

    @property
    def messages(self) -> Messages:
        return "link"

    @property
    def adds_in_backward(self) -> bool:
        return self.prices.adds_in_backward

    def for_model(self, sizes: Sizes) -> Prices:
        return FreeCommunication(self.prices.for_model(sizes))

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        return self.prices.compute_time(op, specs, sizes)

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        return 0.0

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        return 0.0, 0.0

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return 0.0
