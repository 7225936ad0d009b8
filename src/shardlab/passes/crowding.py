"""Where memory has no room for all that a pass starts early: which of it stands at the peak, and stays where it was."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.passes.table import Moves
from shardlab.program import OpKind, Sizes
from shardlab.timeline.memory import memory_in_bytes


def crowding(moves: Moves, before: Checked, after: Checked, kept: Sizes | None = None) -> set[int]:
    """The moves of a pass that are under way at the fullest rank's peak, and were not there before it.

    Args:
        moves: the ops of a tape that the pass starts early.
        before, after: a program, and the same in another order.
        kept: how large values are in memory, if not as traced.

    Returns:
        Their places among the moves.
    """
    peaks = memory_in_bytes(after, kept)
    rank = max(range(len(peaks)), key=lambda rank: peaks[rank].peak)
    old, new, at_peak = before.program.tapes[rank], after.program.tapes[rank], peaks[rank].peak_op
    place = {op.handle: at for at, op in enumerate(new) if op.handle >= 0 and op.kind is not OpKind.WAIT}
    then = old.index(new[at_peak])
    started = moves(old, before.specs[rank])
    return {number for number, at in enumerate(started) if at > then and place[old[at].handle] <= at_peak}
