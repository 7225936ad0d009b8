"""Deadlock under the strict channel models, decided by one replay each.

Control flow does not depend on data and no rank takes "whichever comes first", so whether a program hangs does
not depend on timing: a single replay decides. A rendezvous is a weaker demand than a queue of rendezvous, and a
buffered send a weaker one still. What runs in one queue also runs in several: all that precedes an operation on its
ranks is over when its turn comes, so nothing keeps it from the head of any queue, and the ranks come to make a
communicator in that order too. So a program that passes the single queue passes all five models, but for a message
between an exchange and a single call. And the single queue needs no replay of waits: what a rank waits for stands in
its queue before all that it issues afterwards, so it is enough that the queues empty. Most programs end there; a replay
says why one does not.
"""

from __future__ import annotations

from shardlab.check.checked import ChannelModel
from shardlab.check.replay import Replay
from shardlab.program import Program
from shardlab.program.matching import Communication
from shardlab.program.ops import Stream

COPY = Stream.COPY

SIDE_BY_SIDE = (
    " It passes only where communicators work side by side; NCCL does not promise that, and with device_id, which "
    "ranks start with, all messages share one."
)
"""Ends the sentence about a program that several queues let pass and a single one does not."""


def decide_models(
    program: Program,
    communications: list[Communication],
    communication_of: list[dict[int, int]],
    half_batched: Communication | None,
) -> dict[ChannelModel, str | None]:
    """Find, for each model, the deadlock or None; the program has passed the dataflow check, and so the lenient two.

    Args:
        half_batched: the first message with one end in an exchange and the other not, if there is one.
    """

    def deadlock(model: ChannelModel) -> str | None:
        return Replay(program, communications, communication_of, model).deadlock()

    queued = None if empties(program, communications) else deadlock(ChannelModel.QUEUED)
    if half_batched is not None:
        per_pair = _two_communicators(program, half_batched)
    else:
        per_pair = queued and deadlock(ChannelModel.QUEUED_PER_PAIR)
    rendezvous = queued and per_pair and deadlock(ChannelModel.RENDEZVOUS)
    return {
        ChannelModel.BUFFERED: None,
        ChannelModel.IN_ORDER: None,
        ChannelModel.RENDEZVOUS: rendezvous,
        ChannelModel.QUEUED_PER_PAIR: per_pair,
        ChannelModel.QUEUED: queued and queued + SIDE_BY_SIDE * (per_pair is None),
    }


def empties(program: Program, communications: list[Communication]) -> bool:
    """Whether all communication ends where each rank has one queue, in the order of issue: the model QUEUED.

    A communication takes place when it has come to the head of the queue on all its ranks; a batch comes there at once.
    """
    queues = list(map(iter, _queues(program, communications)))
    at_head = [1] * len(queues)  # communications; the one here stands for what comes before the first
    absent = [len(communication.participants) for communication in communications]
    done, one_less = 0, list(range(len(queues)))  # ranks with one communication less at the head
    while one_less:
        rank = one_less.pop()
        at_head[rank] -= 1
        if at_head[rank]:
            continue
        batch = next(queues[rank], ())
        at_head[rank] = len(batch)
        for communication in batch:
            absent[communication] -= 1
            if not absent[communication]:
                done += 1
                one_less += [member[0] for member in communications[communication].participants]
    return done == sum(communication.stream is not COPY for communication in communications)


def _queues(program: Program, communications: list[Communication]) -> list[list[list[int]]]:
    """For each rank its communications in the order of issue: each alone, or all of a batch."""
    issued: list[list[tuple[int, int]]] = [[] for _ in program.tapes]  # (index of the op, communication)
    for number, (stream, _, members) in enumerate(communications):
        if stream is COPY:  # it takes turns with nothing
            continue
        for rank, _, at in members:
            issued[rank].append((at, number))
    queues: list[list[list[int]]] = []
    for tape, numbers in zip(program.tapes, issued, strict=True):
        queue: list[list[int]] = []
        last = -1
        for at, number in sorted(numbers):
            batch = tape[at].batch
            if batch >= 0 and batch == last:
                queue[-1].append(number)
            else:
                queue.append([number])
            last = batch
        queues.append(queue)
    return queues


def _two_communicators(program: Program, half_batched: Communication) -> str:
    """A message with one end in an exchange and the other not: on two communicators they never meet."""
    named = [(rank, at, program.tapes[rank][at]) for rank, _, at in half_batched.participants]
    ends = "; ".join(f"rank {rank} waits in {op} (its op {at})" for rank, at, op in named)
    return f"deadlock: {ends}: one is part of an exchange and the other is not, so they never meet."
