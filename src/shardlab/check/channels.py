"""Deadlock under the strict channel models, decided by one replay each.

Control flow does not depend on data and no rank takes "whichever comes first", so whether a program hangs does
not depend on timing: a single replay decides. A rendezvous is a weaker demand than a queue of rendezvous, and a
buffered send a weaker one still. What runs in one queue also runs in several: all that precedes an operation on its
ranks is over when its turn comes, so nothing keeps it from the head of any queue, and the ranks come to make a
communicator in that order too. So a program that passes the single queue passes all five models, but for a message
between an exchange and a single call.
"""

from __future__ import annotations

from shardlab.check.checked import ChannelModel
from shardlab.check.replay import Replay
from shardlab.program import Program
from shardlab.program.matching import Meeting
from shardlab.program.ops import Stream

SIDE_BY_SIDE = (
    " It passes only where communicators work side by side; NCCL does not promise that, and with device_id, which "
    "ranks start with, all messages share one. Issue in one order on all ranks, or put messages that cross into one "
    "exchange."
)
"""Ends the sentence about a program that several queues let pass and a single one does not."""


def decide_models(
    program: Program, meetings: list[Meeting], meeting_of: list[dict[int, int]]
) -> dict[ChannelModel, str | None]:
    """Find, for each model, the deadlock or None; the program has passed the dataflow check, and so the lenient two."""

    def deadlock(model: ChannelModel) -> str | None:
        return Replay(program, meetings, meeting_of, model).deadlock()

    queued = deadlock(ChannelModel.QUEUED)
    per_pair = _two_communicators(program, meetings) or (queued and deadlock(ChannelModel.QUEUED_PER_PAIR))
    rendezvous = queued and per_pair and deadlock(ChannelModel.RENDEZVOUS)
    return {
        ChannelModel.BUFFERED: None,
        ChannelModel.IN_ORDER: None,
        ChannelModel.RENDEZVOUS: rendezvous,
        ChannelModel.QUEUED_PER_PAIR: per_pair,
        ChannelModel.QUEUED: queued and queued + SIDE_BY_SIDE * (per_pair is None),
    }


def _two_communicators(program: Program, meetings: list[Meeting]) -> str | None:
    """Find a message with one end in an exchange and the other not: on two communicators they never meet."""
    for meeting in meetings:
        if meeting.stream is Stream.MESSAGE:
            sender, receiver = ((m.rank, m.op, program.tapes[m.rank][m.op]) for m in meeting.members)
            if (sender[2].batch < 0) != (receiver[2].batch < 0):
                ends = "; ".join(f"rank {rank} waits in {op} (its op {at})" for rank, at, op in (sender, receiver))
                return f"deadlock: {ends}: one is part of an exchange and the other is not, so they never meet."
    return None
