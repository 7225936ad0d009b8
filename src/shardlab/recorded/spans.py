"""Start and end of each op of a recorded step, on one clock, by the rules that simulated clocks follow."""

from __future__ import annotations

from collections.abc import Mapping

from shardlab.check import Checked
from shardlab.program.matching import stream_of
from shardlab.program.ops import COMMUNICATION
from shardlab.program.record import StepRecord

Spans = dict[int, tuple[float, float]]
"""Start and end of ops, by place on the tape."""


def spans(checked: Checked, steps: Mapping[int, StepRecord], offsets: Mapping[int, float]) -> dict[int, Spans]:
    """List for each rank the ops that it finished, in seconds since the first rank began.

    Compute is as it was seen. A communication ends when this rank's part was over, and starts when its last member had
    come, or when the one that was over just before it on the same communicator was, if that is later: what a group has
    in flight at the same time shares its links, and is listed one after the other, as on a stream.

    Args:
        steps: one step, by rank.
        offsets: what to take from each rank's clock.
    """
    zero = min((step.began - offsets[rank] for rank, step in steps.items()), default=0.0)
    shift = {rank: -offsets[rank] - zero for rank in steps}
    found: dict[int, Spans] = {rank: {} for rank in steps}
    arrived: dict[int, float] = {}
    parts: list[tuple[float, int, int, int]] = []  # (over, rank, op, communication)
    for rank, step in steps.items():
        tape = checked.program.tapes[rank]
        for at, moments in step.ops.items():
            if tape[at].kind in COMMUNICATION:
                communication = checked.communication_of[rank][tape[at].handle]
                arrived[communication] = max(arrived.get(communication, 0.0), moments.began + shift[rank])
                if moments.over is not None:
                    parts.append((moments.over + shift[rank], rank, at, communication))
            elif moments.ended is not None:
                found[rank][at] = (moments.began + shift[rank], moments.ended + shift[rank])
    free: dict[tuple[int, object], float] = {}
    for over, rank, at, communication in sorted(parts):
        stream = (rank, stream_of(checked.program, checked.communications[communication]))
        found[rank][at] = (min(over, max(arrived[communication], free.get(stream, 0.0))), over)
        free[stream] = over
    return found
