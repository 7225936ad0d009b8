"""Memory by category over time, as a counter that a trace viewer draws."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardlab.program import Op, OpKind
from shardlab.timeline.clocks import Times
from shardlab.timeline.memory import CATEGORIES, Category, memory_in_bytes
from shardlab.timeline.timeline import Timeline
from shardlab.timeline.traced import Traced

Counter = list[tuple[float, dict[str, int]]]
"""Moments, and the bytes of each category that are live from then on."""


def memory_counters(traced: Traced, times: Times) -> list[Counter]:
    """The counter of each row of a replay; one without an arena has no word of it."""
    counters: list[Counter] = []
    for row, memory in enumerate(memory_in_bytes(traced, counters=True)):
        tape = traced.program.tapes[row]
        arena = any(live[CATEGORIES.index(Category.ARENA)] for live in memory.counters[:1])
        names = {
            place: category.value
            for place, category in enumerate(CATEGORIES)
            if arena or category is not Category.ARENA
        }
        named = ({name: live[place] for place, name in names.items()} for live in memory.counters)
        counters.append(counter_of(zip(moments(tape, times.starts[row], times.ends[row]), named, strict=True)))
    return counters


def counter_of(samples: Iterable[tuple[float, dict[str, int]]]) -> Counter:
    """Changes of what was live at each op, in tape order; the last of each moment."""
    counter: Counter = []
    for time, live in samples:
        if counter and counter[-1][0] == time:
            counter[-1] = (time, live)
        elif not counter or counter[-1][1] != live:
            counter.append((time, live))
    return counter


def moments(tape: Sequence[Op], starts: Sequence[float], ends: Sequence[float]) -> list[float]:
    """When compute has got to each op: compute counts from its start, a communication from its issue."""
    clock, reached = 0.0, list[float]()
    issued: dict[int, int] = {}
    for at, op in enumerate(tape):
        if op.kind is OpKind.WAIT:
            clock = max(clock, ends[issued[op.handle]])
        elif op.handle >= 0:
            issued[op.handle] = at
        elif op.kind is not OpKind.FREE:
            clock = max(clock, starts[at])
        reached.append(clock)
        if op.handle < 0 and op.kind is not OpKind.FREE:
            clock = max(clock, ends[at])
    return reached


def moments_of(timeline: Timeline, row: int) -> list[float]:
    """When the compute of a timeline's row has got to each op; an op that has no event takes no time."""
    tape = timeline.program.tapes[row]
    starts, ends = [0.0] * len(tape), [0.0] * len(tape)
    for event in timeline.events[row]:
        starts[event.op], ends[event.op] = event.start, event.end
    return moments(tape, starts, ends)
