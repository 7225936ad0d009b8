"""Clocks and memory together: a checked program's timeline."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.timeline.clocks import Clocks, Times
from shardlab.timeline.costs import UNIT_COSTS, Costs
from shardlab.timeline.memory import live_memory
from shardlab.timeline.timeline import Event, Timeline, is_event
from shardlab.timeline.traced import Traced


def simulate(traced: Traced, costs: Costs = UNIT_COSTS) -> Timeline:
    """When each op of a checked program starts and ends, and how many elements are live, in unit costs."""
    return timeline_of(traced, Clocks(traced, costs).run(), live_memory(traced))


def timeline_of(traced: Traced, times: Times, memory: Sequence[Sequence[int]], *, in_seconds: bool = False) -> Timeline:
    """The events of a replay.

    Args:
        memory: for each row and op what is live when it starts.
        in_seconds: whether times are seconds and memory bytes.
    """
    program = traced.program
    events: list[list[Event]] = []
    for row, tape in enumerate(program.tapes):
        specs, starts, ends, live = traced.specs[row], times.starts[row], times.ends[row], memory[row]
        events.append(
            [
                Event(
                    row,
                    at,
                    op.kind,
                    op.layer,
                    specs[(op.inputs or op.outputs)[0]].microbatches if op.inputs or op.outputs else 0,
                    starts[at],
                    ends[at],
                    live[at],
                )
                for at, op in enumerate(tape)
                if is_event(op.kind)
            ]
        )
    return Timeline(program, events, in_seconds)
