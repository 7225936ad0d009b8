"""Deadlock under the two strict channel models, decided by one replay each.

Control flow does not depend on data and no rank takes "whichever comes first", so whether a program hangs does
not depend on timing: a single replay decides. A rendezvous is a weaker demand than a queue of rendezvous, and a
buffered send a weaker one still, so a program that passes the queued model passes all four.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable

from shardlab.check.checked import ChannelModel, Meeting
from shardlab.program import OpKind, Program
from shardlab.program.tape import COMMUNICATION
from shardlab.program.waiting import Wait, explain


def decide_models(
    program: Program, meetings: list[Meeting], meeting_of: list[dict[int, int]]
) -> dict[ChannelModel, str | None]:
    """For each model None, or the deadlock; the program has passed the dataflow check, so it passes the lenient two."""
    queued = _two_communicators(program, meetings) or Replay(program, meetings, meeting_of, queued=True).deadlock()
    rendezvous = queued and Replay(program, meetings, meeting_of, queued=False).deadlock()
    return {
        ChannelModel.BUFFERED: None,
        ChannelModel.IN_ORDER: None,
        ChannelModel.RENDEZVOUS: rendezvous,
        ChannelModel.QUEUED: queued,
    }


def _two_communicators(program: Program, meetings: list[Meeting]) -> str | None:
    """A message of which one end is part of an exchange and the other is not: on NCCL they would never meet."""
    for meeting in meetings:
        if meeting.group is None:
            sender, receiver = ((m.rank, m.op, program.tapes[m.rank][m.op]) for m in meeting.members)
            if (sender[2].batch < 0) != (receiver[2].batch < 0):
                ends = "; ".join(f"rank {rank} waits in {op} (its op {at})" for rank, at, op in (sender, receiver))
                return f"deadlock: {ends}: one is part of an exchange and the other is not, so they never meet."
    return None


class Slot:
    """Operations that stand at one place of a communicator's queue: one, or those that an exchange issues together."""

    def __init__(self, batch: int, meeting: int) -> None:
        self.batch = batch
        self.open = {meeting}


class Replay:
    """Issues and waits of all ranks, with every communication a rendezvous."""

    def __init__(
        self, program: Program, meetings: list[Meeting], meeting_of: list[dict[int, int]], *, queued: bool
    ) -> None:
        self.program = program
        self.meetings = meetings
        self.meeting_of = meeting_of
        self.queued = queued
        self.came = [0] * len(meetings)
        self.done = bytearray(len(meetings))
        self.waiting: dict[int, int] = {}  # rank -> the meeting that it waits for
        self.waiters: dict[int, list[int]] = defaultdict(list)
        self.queues: dict[tuple[int, Hashable], deque[Slot]] = defaultdict(deque)
        self.communicator: list[Hashable] = [self._communicator(meeting) for meeting in meetings]
        self.size = [len(meeting.members) for meeting in meetings]

    def deadlock(self) -> str | None:
        """Replay to the end: None, or the cycle in which the ranks wait."""
        positions = [
            [op for op in tape if op[0] is OpKind.WAIT or op[0] in COMMUNICATION] for tape in self.program.tapes
        ]
        at = [0] * len(positions)
        runnable = deque(range(len(positions)))
        while runnable:
            rank = runnable.popleft()
            ops, meeting_of = positions[rank], self.meeting_of[rank]
            for index in range(at[rank], len(ops)):
                op = ops[index]
                meeting = meeting_of[op[4]]
                if op[0] is not OpKind.WAIT:
                    runnable.extend(self._issue(rank, meeting, op.batch))
                elif not self.done[meeting]:
                    at[rank] = index
                    self.waiting[rank] = meeting
                    self.waiters[meeting].append(rank)
                    break
        if not self.waiting:
            return None
        return explain({rank: self._wait(rank, meeting) for rank, meeting in self.waiting.items()})

    def _communicator(self, meeting: Meeting) -> Hashable:
        """A group's collectives have one, two ranks' messages another; all exchanges share that of the whole world.

        So torch.distributed does on NCCL: `batch_isend_irecv` uses the process group's communicator, a single send or
        receive one of the two ranks (ProcessGroupNCCL::pointToPoint).
        """
        if meeting.group is not None:
            return meeting.group
        if any(self.program.tapes[member.rank][member.op].batch >= 0 for member in meeting.members):
            return "exchanges"
        return frozenset(member.rank for member in meeting.members)

    def _issue(self, rank: int, meeting: int, batch: int) -> list[int]:
        """One member has come; gives the ranks that may go on."""
        self.came[meeting] += 1
        if self.queued:
            queue = self.queues[rank, self.communicator[meeting]]
            if batch >= 0 and queue and queue[-1].batch == batch:
                queue[-1].open.add(meeting)
            else:
                queue.append(Slot(batch, meeting))
        return self._complete([meeting])

    def _complete(self, candidates: list[int]) -> list[int]:
        """Complete what can be; a completion may bring others to the head of their queues."""
        woken: list[int] = []
        while candidates:
            meeting = candidates.pop()
            if self.came[meeting] < self.size[meeting] or self.done[meeting]:
                continue
            if self.queued:
                key = self.communicator[meeting]
                queues = [self.queues[member.rank, key] for member in self.meetings[meeting].members]
                if not all(meeting in queue[0].open for queue in queues):
                    continue
                for queue in queues:
                    queue[0].open.discard(meeting)
                    if not queue[0].open:
                        queue.popleft()
                        if queue:
                            candidates.extend(queue[0].open)
            self.done[meeting] = 1
            for rank in self.waiters.pop(meeting, ()):
                del self.waiting[rank]
                woken.append(rank)
        return woken

    def _wait(self, rank: int, meeting: int) -> Wait:
        """What a blocked rank waits for: absent members, or in the end of the operations queued before its own."""
        text = self._op(rank, meeting)
        behind = [meeting]
        while True:
            members = self.meetings[behind[-1]].members
            absent = [m.rank for m in members if not self._has_issued(m.rank, m.op)]
            if absent:
                if len(behind) > 1:
                    text += f", which waits for rank {absent[0]}'s {self._op(absent[0], behind[-1])}"
                return Wait(text, absent)
            heads = [(m.rank, self.queues[m.rank, self.communicator[behind[-1]]][0].open) for m in members]
            queued, before = next((at, min(head)) for at, head in heads if behind[-1] not in head)
            text += f", which is queued behind rank {queued}'s {self._op(queued, before)}"
            if before in behind:
                return Wait(text, [m.rank for m in members if m.rank != rank])
            behind.append(before)

    def _op(self, rank: int, meeting: int) -> str:
        at = next(member.op for member in self.meetings[meeting].members if member.rank == rank)
        return f"{self.program.tapes[rank][at]} (its op {at})"

    def _has_issued(self, rank: int, op: int) -> bool:
        """Whether a blocked or ended rank has got past one of its ops."""
        if rank not in self.waiting:
            return True
        waits_for = self.waiting[rank]
        handle = next(m.handle for m in self.meetings[waits_for].members if m.rank == rank)
        tape = self.program.tapes[rank]
        return op < next(i for i, o in enumerate(tape) if o.kind is OpKind.WAIT and o.handle == handle)
