"""Deadlocks under the strict channel models (rendezvous and the two queued ones).

Control flow does not depend on data, and no rank receives from any source that comes first. So timing does not decide
whether a program hangs, and a single replay finds out.

The models are ordered by strictness: a buffered send, a rendezvous, a queue of rendezvous. A program that passes with
one queue per rank also passes with several: when an operation reaches the head of the single queue, all earlier
operations on its ranks are done, so it is at the head of every queue. Ranks create communicators in that order too. So
a program that passes the single queue passes all five models, unless one end of a message is in a batch
(`batch_isend_irecv`) and the other end is not.

For the single queue, waits need no replay, since a rank queues a communication before it waits for it. The program
passes if all queues become empty (`queues_empty`), as for most programs. Otherwise `Replay` finds the deadlock.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator

from shardlab.check.checked import ChannelModel
from shardlab.language import Op, OpKind, Program
from shardlab.language.ops import COLLECTIVES, POINT_TO_POINT, Stream
from shardlab.language.tape import EXCHANGES, Communication, communicator_of
from shardlab.language.values import Wait, deadlock_sentence

WAIT, COPY = OpKind.WAIT, Stream.COPY
SYNCHRONIZING = COLLECTIVES | POINT_TO_POINT

SIDE_BY_SIDE = (
    " It passes only where communicators work side by side; NCCL does not promise that, and with device_id, which "
    "ranks start with, all messages share one."
)
"""End of the sentence about a program that passes with several queues, but not with one."""


def decide_models(
    program: Program,
    communications: list[Communication],
    communication_of: list[dict[int, int]],
    half_batched: Communication | None,
) -> dict[ChannelModel, str | None]:
    """Return, for each model, the deadlock that the program runs into, or None.

    The program must have passed the dataflow check, which covers the two lenient models.

    Args:
        half_batched: the first message with one end in an exchange and the other end in a single call, if there is one.
    """

    def deadlock(model: ChannelModel) -> str | None:
        return Replay(program, communications, communication_of, model).deadlock()

    queued = None if queues_empty(program, communications) else deadlock(ChannelModel.QUEUED)
    if half_batched is not None:
        per_pair = _half_batched_sentence(program, half_batched)
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


def queues_empty(program: Program, communications: list[Communication]) -> bool:
    """Return whether a program passes QUEUED, where each rank has one queue in the order of issue.

    A communication runs when it is at the head of the queues of all its ranks. The operations of a batch are at the
    head together.
    """
    queues = list(map(iter, _queues(program, communications)))
    at_head = [1] * len(queues)  # open communications at the head; the first count is a placeholder
    absent = [len(communication.participants) for communication in communications]
    finished_count, shortened = 0, list(range(len(queues)))  # ranks whose head has lost a communication
    while shortened:
        rank = shortened.pop()
        at_head[rank] -= 1
        if at_head[rank]:
            continue
        batch = next(queues[rank], ())
        at_head[rank] = len(batch)
        for communication in batch:
            absent[communication] -= 1
            if not absent[communication]:
                finished_count += 1
                shortened += [member[0] for member in communications[communication].participants]
    return finished_count == sum(communication.stream is not COPY for communication in communications)


class QueueEntry:
    """Entry of a queue: an operation, or the operations of a batch, which are issued together."""

    __slots__ = ("batch", "open")

    def __init__(self, batch: int, number: int) -> None:
        self.batch = batch
        self.open = {number}


class Replay:
    """Replay of a program under RENDEZVOUS or a model with queues.

    NCCL queues operations as follows (ProcessGroupNCCL::pointToPoint in torch 2.9 to 2.13, and NCCL's documentation):

    - After `init_process_group(device_id=...)` all messages of a process group, batched or not, use its communicator.
      So they run one after the other (pytorch/pytorch#156748; the warning of #154132 says so).
    - Without `device_id`, a single send or receive uses a communicator of the two ranks. It is created at its first
      use, while the process waits for the other rank. `batch_isend_irecv` uses the group's communicator. So a batched
      send never matches a receive outside a batch, nor the reverse.
    - Operations on two communicators of a GPU may run side by side, but CUDA does not promise it, and the first message
      between two ranks also waits for a connection. If two ranks issue two operations (a message and a collective,
      or two collectives) in different orders, each may hold resources that the other needs (NVIDIA/nccl#783, #1192,
      #1766; NCCL's documentation, "Using multiple NCCL communicators concurrently"). So QUEUED has one queue for each
      rank.
    """

    def __init__(
        self, program: Program, communications: list[Communication], numbers: list[dict[int, int]], model: ChannelModel
    ) -> None:
        self.program = program
        self.communications = communications
        self.numbers = numbers
        self.queued = model is not ChannelModel.RENDEZVOUS
        self.per_pair = model is ChannelModel.QUEUED_PER_PAIR
        self.size = [len(communication.participants) for communication in communications]
        self.arrived = [0] * len(communications)
        self.complete = bytearray(len(communications))
        self.runnable = deque(range(len(program.tapes)))
        self.blocked_on: dict[int, int] = {}  # rank -> communication that it waits for, or to issue
        self.waiters: dict[int, list[int]] = defaultdict(list)
        self.queue_of: list[Hashable] = [communicator_of(program, m) if self.per_pair else None for m in communications]
        self.queues: list[dict[Hashable, deque[QueueEntry]]] = [defaultdict(deque) for _ in program.tapes]
        self.created: set[Hashable] = {EXCHANGES}
        self.batch_of: list[dict[int, list[int]]] = self._batches() if self.queued else [{} for _ in program.tapes]
        self.stopped: dict[int, int] = {}  # rank -> the handle that its last WAIT was for
        self.joining: dict[Hashable, list[int]] = defaultdict(list)  # communicator -> ranks that wait to create it

    def deadlock(self) -> str | None:
        """Replay to the end, and return None or the cycle of waits."""
        tapes = [list(self._synchronizing_ops(rank)) for rank in range(len(self.program.tapes))]
        at = [0] * len(tapes)
        while self.runnable:
            rank = self.runnable.popleft()
            ops, numbers = tapes[rank], self.numbers[rank]
            for index in range(at[rank], len(ops)):
                op = ops[index]
                number = numbers[op[4]]
                if op[0] is WAIT:
                    if op[4] in self.batch_of[rank]:
                        number = next((m for m in self.batch_of[rank][op[4]] if not self.complete[m]), number)
                    if self.complete[number]:
                        continue
                    self.stopped[rank] = op[4]
                    self.waiters[number].append(rank)
                elif not self.per_pair or self._joins(rank, number):
                    self._issue(rank, number, op.batch)
                    continue
                at[rank] = index
                self.blocked_on[rank] = number
                break
        if not self.blocked_on:
            return None
        return deadlock_sentence({rank: self._wait(rank, number) for rank, number in self.blocked_on.items()})

    def _synchronizing_ops(self, rank: int) -> Iterator[Op]:
        """Yield the ops of a rank that involve other ranks, with their waits."""
        for op in self.program.tapes[rank]:
            waits = op[0] is WAIT and self.communications[self.numbers[rank][op[4]]].stream is not COPY
            if waits or op[0] in SYNCHRONIZING:
                yield op

    def _batches(self) -> list[dict[int, list[int]]]:
        """Return for each rank a map from the handle of a batched message to the communications of its batch, since
        NCCL awaits a batch as one.
        """
        batches: list[dict[int, list[int]]] = []
        for tape, numbers in zip(self.program.tapes, self.numbers, strict=True):
            handles: dict[int, list[int]] = defaultdict(list)
            for op in tape:
                if op.batch >= 0:
                    handles[op.batch].append(op.handle)
            batches.append({h: [numbers[other] for other in batch] for batch in handles.values() for h in batch})
        return batches

    def _joins(self, rank: int, number: int) -> bool:
        """Return whether a communication's communicator exists, or is created now.

        Its ranks create it together: the first ones wait, and the last one to arrive wakes them.
        """
        key = self.queue_of[number]
        if key in self.created:
            return True
        others = self.joining[key]
        if len(others) + 1 < self.size[number]:
            others.append(rank)
            return False
        for other in others:
            del self.blocked_on[other]
        self.runnable.extend(others)
        del self.joining[key]
        self.created.add(key)
        return True

    def _issue(self, rank: int, number: int, batch: int) -> None:
        """Record that one member has issued its part."""
        self.arrived[number] += 1
        if self.queued:
            queue = self.queues[rank][self.queue_of[number]]
            if batch >= 0 and queue and queue[-1].batch == batch:
                queue[-1].open.add(number)
            else:
                queue.append(QueueEntry(batch, number))
        if self.arrived[number] == self.size[number]:
            self._complete([number])

    def _complete(self, candidates: list[int]) -> None:
        """Complete all communications that are ready. A completion may bring others to the head of their queues."""
        while candidates:
            number = candidates.pop()
            if self.arrived[number] < self.size[number] or self.complete[number]:
                continue
            if self.queued:
                key = self.queue_of[number]
                queues = [self.queues[member.rank][key] for member in self.communications[number].participants]
                if not all(number in queue[0].open for queue in queues):
                    continue
                for queue in queues:
                    queue[0].open.discard(number)
                    if not queue[0].open:
                        queue.popleft()
                        if queue:
                            candidates.extend(queue[0].open)
            self.complete[number] = 1
            for rank in self.waiters.pop(number, ()):
                del self.blocked_on[rank]
                self.runnable.append(rank)

    def _wait(self, rank: int, number: int) -> Wait:
        """Return the reason why a rank is blocked: absent members, or operations queued before its own."""
        text = self._op(rank, number)
        joined = self.joining.get(self.queue_of[number], ())
        if rank in joined:
            absent = [m.rank for m in self.communications[number].participants if m.rank not in joined]
            return Wait(f"{text}, the first use of its communicator, which waits for rank {absent[0]}", absent)
        chain = [number]
        while True:
            members = self.communications[chain[-1]].participants
            absent = [m.rank for m in members if not self._has_issued(m.rank, m.op)]
            if absent:
                if len(chain) > 1:
                    text += f", which waits for rank {absent[0]}'s {self._op(absent[0], chain[-1])}"
                return Wait(text, absent)
            heads = [(m.rank, self.queues[m.rank][self.queue_of[chain[-1]]][0].open) for m in members]
            queued, blocker = next((index, min(head)) for index, head in heads if chain[-1] not in head)
            text += f", which is queued behind rank {queued}'s {self._op(queued, blocker)}"
            if blocker in chain:
                return Wait(text, [m.rank for m in members if m.rank != rank])
            chain.append(blocker)

    def _op(self, rank: int, number: int) -> str:
        """Return a rank's op in a communication as text."""
        index = next(member.op for member in self.communications[number].participants if member.rank == rank)
        return f"{self.program.tapes[rank][index]} (its op {index})"

    def _has_issued(self, rank: int, op: int) -> bool:
        """Return whether a rank has issued one of its ops before it was blocked or ended."""
        if rank not in self.blocked_on:
            return True
        number = self.blocked_on[rank]
        if rank in self.joining.get(self.queue_of[number], ()):
            return op < next(member.op for member in self.communications[number].participants if member.rank == rank)
        tape, handle = self.program.tapes[rank], self.stopped[rank]
        return op < next(i for i, o in enumerate(tape) if o.kind is OpKind.WAIT and o.handle == handle)


def _queues(program: Program, communications: list[Communication]) -> list[list[list[int]]]:
    """Return for each rank its communications in the order of issue. The communications of a batch form one entry."""
    issued: list[list[tuple[int, int]]] = [[] for _ in program.tapes]  # (index of the op, communication)
    for number, (stream, _, members) in enumerate(communications):
        if stream is COPY:  # a copy stands in no queue
            continue
        for rank, _, index in members:
            issued[rank].append((index, number))
    queues: list[list[list[int]]] = []
    for tape, numbers in zip(program.tapes, issued, strict=True):
        queue: list[list[int]] = []
        last = -1
        for index, number in sorted(numbers):
            batch = tape[index].batch
            if batch >= 0 and batch == last:
                queue[-1].append(number)
            else:
                queue.append([number])
            last = batch
        queues.append(queue)
    return queues


def _half_batched_sentence(program: Program, half_batched: Communication) -> str:
    """Return the deadlock of a message between an exchange and a single call, which use different communicators."""
    members = [(rank, index, program.tapes[rank][index]) for rank, _, index in half_batched.participants]
    ends = "; ".join(f"rank {rank} waits in {op} (its op {index})" for rank, index, op in members)
    return f"deadlock: {ends}: one is part of an exchange and the other is not, so they never meet."
