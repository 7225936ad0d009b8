"""Memory by category over time, as a counter that a trace viewer draws."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program import Op, OpKind
from shardlab.simulate.estimate import Estimate
from shardlab.simulate.memory import CATEGORIES, memory_in_bytes

Counter = list[tuple[float, dict[str, int]]]
"""Moments, and the bytes of each category that are live from then on."""


def memory_counters(estimate: Estimate) -> list[Counter]:
    """For each row."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_bytes(estimate.traced, counters=True)):
        tape, times = estimate.traced.program.tapes[row], estimate.times
        counter: Counter = []
        for time, live in zip(moments(tape, times.starts[row], times.ends[row]), memory.counters, strict=True):
            named = dict(zip((category.value for category in CATEGORIES), live, strict=True))
            if counter and counter[-1][0] == time:
                counter[-1] = (time, named)
            elif not counter or counter[-1][1] != named:
                counter.append((time, named))
        counters.append(counter)
    return counters


def moments(tape: Sequence[Op], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """When compute has got to each op: compute counts from its start, a communication from its issue."""
    clock, said = 0.0, list[float]()
    issued: dict[int, int] = {}
    for at, op in enumerate(tape):
        if op.kind is OpKind.WAIT:
            clock = max(clock, ends[issued[op.handle]])
        elif op.handle >= 0:
            issued[op.handle] = at
        elif op.kind is not OpKind.FREE:
            clock = max(clock, starts[at])
        said.append(clock)
        if op.handle < 0 and op.kind is not OpKind.FREE:
            clock = max(clock, ends[at])
    return said
