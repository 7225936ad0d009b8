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

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator

from shardlab.check.checked import ChannelModel
from shardlab.language import Op, OpKind, Program
from shardlab.language.ops import COLLECTIVES, POINT_TO_POINT, Stream
from shardlab.language.tape import EXCHANGES, Communication, communicator
from shardlab.language.values import Wait, explain

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


# Issues and waits of all ranks, replayed with every communication a rendezvous.


WAIT, COPY_STREAM = OpKind.WAIT, Stream.COPY
MEETINGS = COLLECTIVES | POINT_TO_POINT


class Slot:
    """Operations that stand at one place of a queue: one, or those that an exchange issues together."""

    __slots__ = ("batch", "open")

    def __init__(self, batch: int, number: int) -> None:
        self.batch = batch
        self.open = {number}


class Replay:
    """A run of a program under RENDEZVOUS or a model that queues.

    How NCCL queues follows from ProcessGroupNCCL::pointToPoint (torch 2.9 to 2.13) and from what NCCL says of itself:

    - After `init_process_group(device_id=...)` all messages of a process group, batched or not, use its communicator,
      so they run one after the other (pytorch/pytorch#156748, first #154132, whose warning says so).
    - Without `device_id`, a single send or receive uses a communicator of the two ranks, which is made at its first
      use, while the process waits for the other one; `batch_isend_irecv` uses the group's. So one half of a message in
      a batch never meets another half outside it.
    - Operations on two communicators of a GPU may run side by side, but CUDA does not promise it, and the first message
      between two ranks also waits for a connection: if two ranks issue a message and a collective in different orders,
      or two collectives, either may hold what the other waits for (NVIDIA/nccl#783, #1192, #1766; NCCL's
      documentation, "Using multiple NCCL communicators concurrently"). So QUEUED has one queue for each rank.
    """

    def __init__(
        self, program: Program, communications: list[Communication], numbers: list[dict[int, int]], model: ChannelModel
    ) -> None:
        self.program = program
        self.communications = communications
        self.numbers = numbers
        self.queued = model is not ChannelModel.RENDEZVOUS
        self.per_pair = model is ChannelModel.QUEUED_PER_PAIR
        self.size = [len(each.participants) for each in communications]
        self.arrived = [0] * len(communications)
        self.done = bytearray(len(communications))
        self.runnable = deque(range(len(program.tapes)))
        self.waiting: dict[int, int] = {}  # rank -> the communication that it waits for, or (if it joins) is to issue
        self.waiters: dict[int, list[int]] = defaultdict(list)
        self.lanes: list[Hashable] = [communicator(program, m) if self.per_pair else None for m in communications]
        self.queues: list[dict[Hashable, deque[Slot]]] = [defaultdict(deque) for _ in program.tapes]
        self.made: set[Hashable] = {EXCHANGES}
        self.together: list[dict[int, list[int]]] = self._batches() if self.queued else [{} for _ in program.tapes]
        self.stopped: dict[int, int] = {}  # rank -> the handle that its last WAIT was for
        self.joining: dict[Hashable, list[int]] = defaultdict(list)  # communicator -> ranks that wait to make it

    def deadlock(self) -> str | None:
        """Replay to the end: None, or the cycle in which the ranks wait."""
        tapes = [list(self._meetings(rank)) for rank in range(len(self.program.tapes))]
        at = [0] * len(tapes)
        while self.runnable:
            rank = self.runnable.popleft()
            ops, numbers = tapes[rank], self.numbers[rank]
            for index in range(at[rank], len(ops)):
                op = ops[index]
                number = numbers[op[4]]
                if op[0] is WAIT:
                    if op[4] in self.together[rank]:
                        number = next((m for m in self.together[rank][op[4]] if not self.done[m]), number)
                    if self.done[number]:
                        continue
                    self.stopped[rank] = op[4]
                    self.waiters[number].append(rank)
                elif not self.per_pair or self._joins(rank, number):
                    self._issue(rank, number, op.batch)
                    continue
                at[rank] = index
                self.waiting[rank] = number
                break
        if not self.waiting:
            return None
        return explain({rank: self._wait(rank, number) for rank, number in self.waiting.items()})

    def _meetings(self, rank: int) -> Iterator[Op]:
        """What a rank issues together with others, and its waits for that: it alone takes turns with nothing."""
        for op in self.program.tapes[rank]:
            waits = op[0] is WAIT and self.communications[self.numbers[rank][op[4]]].stream is not COPY_STREAM
            if waits or op[0] in MEETINGS:
                yield op

    def _batches(self) -> list[dict[int, list[int]]]:
        """For each rank and handle of a batched message: the communications of its batch, which NCCL awaits as one."""
        found: list[dict[int, list[int]]] = []
        for tape, numbers in zip(self.program.tapes, self.numbers, strict=True):
            handles: dict[int, list[int]] = defaultdict(list)
            for op in tape:
                if op.batch >= 0:
                    handles[op.batch].append(op.handle)
            found.append({h: [numbers[other] for other in batch] for batch in handles.values() for h in batch})
        return found

    def _joins(self, rank: int, number: int) -> bool:
        """Whether an op's communicator is made; its ranks make it together, and the last one to come wakes the rest."""
        lane = self.lanes[number]
        if lane in self.made:
            return True
        others = self.joining[lane]
        if len(others) + 1 < self.size[number]:
            others.append(rank)
            return False
        for other in others:
            del self.waiting[other]
        self.runnable.extend(others)
        del self.joining[lane]
        self.made.add(lane)
        return True

    def _issue(self, rank: int, number: int, batch: int) -> None:
        """Note that one member has come."""
        self.arrived[number] += 1
        if self.queued:
            queue = self.queues[rank][self.lanes[number]]
            if batch >= 0 and queue and queue[-1].batch == batch:
                queue[-1].open.add(number)
            else:
                queue.append(Slot(batch, number))
        if self.arrived[number] == self.size[number]:
            self._complete([number])

    def _complete(self, candidates: list[int]) -> None:
        """Complete what can be; a completion may bring others to the head of their queues."""
        while candidates:
            number = candidates.pop()
            if self.arrived[number] < self.size[number] or self.done[number]:
                continue
            if self.queued:
                lane = self.lanes[number]
                queues = [self.queues[member.rank][lane] for member in self.communications[number].participants]
                if not all(number in queue[0].open for queue in queues):
                    continue
                for queue in queues:
                    queue[0].open.discard(number)
                    if not queue[0].open:
                        queue.popleft()
                        if queue:
                            candidates.extend(queue[0].open)
            self.done[number] = 1
            for rank in self.waiters.pop(number, ()):
                del self.waiting[rank]
                self.runnable.append(rank)

    # What is said of a deadlock.

    def _wait(self, rank: int, number: int) -> Wait:
        """Say what a blocked rank waits for: absent members, or in the end the operations queued before its own."""
        text = self._op(rank, number)
        joined = self.joining.get(self.lanes[number], ())
        if rank in joined:
            absent = [m.rank for m in self.communications[number].participants if m.rank not in joined]
            return Wait(f"{text}, the first use of its communicator, which waits for rank {absent[0]}", absent)
        behind = [number]
        while True:
            members = self.communications[behind[-1]].participants
            absent = [m.rank for m in members if not self._has_issued(m.rank, m.op)]
            if absent:
                if len(behind) > 1:
                    text += f", which waits for rank {absent[0]}'s {self._op(absent[0], behind[-1])}"
                return Wait(text, absent)
            heads = [(m.rank, self.queues[m.rank][self.lanes[behind[-1]]][0].open) for m in members]
            queued, before = next((at, min(head)) for at, head in heads if behind[-1] not in head)
            text += f", which is queued behind rank {queued}'s {self._op(queued, before)}"
            if before in behind:
                return Wait(text, [m.rank for m in members if m.rank != rank])
            behind.append(before)

    def _op(self, rank: int, number: int) -> str:
        at = next(member.op for member in self.communications[number].participants if member.rank == rank)
        return f"{self.program.tapes[rank][at]} (its op {at})"

    def _has_issued(self, rank: int, op: int) -> bool:
        """Whether a blocked or ended rank has got past one of its ops."""
        if rank not in self.waiting:
            return True
        number = self.waiting[rank]
        if rank in self.joining.get(self.lanes[number], ()):
            return op < next(member.op for member in self.communications[number].participants if member.rank == rank)
        tape, handle = self.program.tapes[rank], self.stopped[rank]
        return op < next(i for i, o in enumerate(tape) if o.kind is OpKind.WAIT and o.handle == handle)
