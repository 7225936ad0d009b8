"""Result of the check: the program, the facts that the proof derived, and the order that its ops must keep.

`check` returns a `Checked`, which simulator, passes and executor take. `ChannelModel` names the promises that a
transport can make, and `Checked.why_not` says on which backend a program runs. `Dependences` is the partial order of
one tape's ops, which passes must keep when they reorder a tape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from shardlab.check.in_place import view_roots
from shardlab.common.errors import Refused
from shardlab.language import Kind, Op, OpKind, Program, Spec
from shardlab.language.ops import COMMUNICATION, COPIES
from shardlab.language.tape import Communication, channel_of


class ChannelModel(Enum):
    """Promise that a transport makes, from the most lenient to the strictest.

    A program that passes one model passes all models before it, with one exception: if one end of a message is in an
    exchange and the other is a single call, the program may pass QUEUED, but never passes QUEUED_PER_PAIR.

    BUFFERED: a send never waits, and a receive takes the message that it expects.
    IN_ORDER: a send never waits, and messages between two ranks arrive in the order they were sent.
    RENDEZVOUS: a send waits for its receive (gloo does so even for 16 bytes).
    QUEUED_PER_PAIR: each communicator runs its operations one at a time in issue order, each a rendezvous. A group has
        one communicator, the messages of two ranks have another, and all exchanges have a third. At the first use of a
        communicator its ranks wait for one another (NCCL without `device_id`).
    QUEUED: each rank runs its communication one operation at a time in issue order, each a rendezvous (NCCL with
        `device_id`, as Shardlab starts ranks).
    """

    BUFFERED = "buffered"
    IN_ORDER = "in-order"
    RENDEZVOUS = "rendezvous"
    QUEUED_PER_PAIR = "queued per pair"
    QUEUED = "queued"


BACKENDS = {"gloo": ChannelModel.RENDEZVOUS, "nccl": ChannelModel.QUEUED}
"""Channel model of each torch.distributed backend, as Shardlab starts ranks."""


@dataclass(frozen=True)
class Checked:
    """Program that passed the check, with the facts that the proof derived.

    Attributes:
        program: the tapes.
        specs: for each rank, the spec of each of its values, by number.
        communications: every communication.
        communication_of: for each rank, a map from handle to the index in `communications`.
        models: for each channel model, None if the program passes it, otherwise the deadlock as a sentence.
        not_runnable: why no backend can run the program although it is correct; None if there is no such reason.
        frozen: layers with parameters of which no rank loads an optimizer state, so that they are not trained.
    """

    program: Program
    specs: list[dict[int, Spec]]
    communications: list[Communication]
    communication_of: list[dict[int, int]]
    models: dict[ChannelModel, str | None]
    not_runnable: Refused | None = None
    frozen: tuple[int, ...] = ()

    def __repr__(self) -> str:
        return f"<Checked {self.program!r} that runs on {' and '.join(self.backends()) or 'no backend'}>"

    @cached_property
    def dependences(self) -> list[Dependences]:
        """For each rank, the order that its ops must keep. It is computed at the first use."""

        return [Dependences(tape, rank, self.specs[rank]) for rank, tape in enumerate(self.program.tapes)]

    def backends(self) -> list[str]:
        """Return the torch.distributed backends on which the program runs."""
        return [backend for backend in BACKENDS if self.why_not(backend) is None]

    @cached_property
    def trains(self) -> bool:
        """Whether the program updates weights."""
        return any(op.kind is OpKind.UPDATE for tape in self.program.tapes for op in tape)

    @cached_property
    def clips(self) -> bool:
        """Whether updates take the gradient's norm. Either all updates of a program do, or none does."""
        updates = (
            (rank, op) for rank, tape in enumerate(self.program.tapes) for op in tape if op.kind is OpKind.UPDATE
        )
        return any(self.specs[rank][number].kind is Kind.SCALAR for rank, op in updates for number in op.inputs[3:])

    def why_not(self, backend: str) -> Refused | None:
        """Return why the program does not run on a backend; None if it does."""
        deadlock = self.models[BACKENDS[backend]]
        if self.not_runnable or not deadlock:
            return self.not_runnable
        remedy = "issue in one order on all ranks, or put messages that cross into one exchange"
        return Refused("can hang", f"on {backend} this program can hang", deadlock.removesuffix("."), remedy)


class Dependences:
    """Order that the ops of one tape must keep, as a graph.

    An op comes after the ops that made its inputs, and after the waits for inputs that arrive by communication. A value
    is freed, and memory is overwritten, after all ops that read it. Each rank keeps the order of its communication on
    every channel. Every order that meets these conditions computes the same numbers, bit by bit.

    Args:
        tape: a tape of a program that has passed the check.
        rank: the rank of the tape.
        specs: the specs of the rank's values.

    Attributes:
        tape, rank: the arguments.
        predecessors: for each op, the indices of the ops that it must follow.
        successors: for each op, the indices of the ops that must follow it.
        readers: for each value, the indices of the ops that read it without ending it.
        waits: for each handle, the index of its WAIT.
    """

    def __init__(self, tape: Sequence[Op], rank: int, specs: Mapping[int, Spec]) -> None:
        self.tape, self.rank = tape, rank
        self.waits = {op.handle: index for index, op in enumerate(tape) if op.kind is OpKind.WAIT}
        self.readers: dict[int, list[int]] = defaultdict(list)
        self.predecessors: list[set[int]] = [set() for _ in tape]
        self._available: dict[int, int] = {}  # value -> index of the op that made or awaited it
        self._memory = view_roots(tape, specs)
        self._reads: dict[Hashable, list[int]] = defaultdict(list)  # memory -> indices of the ops that read it
        last_on: dict[Hashable, int] = {}
        for index, op in enumerate(tape):
            predecessors = self.predecessors[index]
            if op.kind is OpKind.WAIT:
                continue
            predecessors.update(self._available[number] for number in op.inputs)
            reads = (read for number in self._overwritten_keys(op, specs) for read in self._reads[number])
            predecessors.update(
                self.end_of(read) if self.end_of(read) < index else read for read in reads
            )  # an update waits for it
            self._note(index, op, specs)
            if op.kind in COMMUNICATION:
                self.predecessors[self.waits[op.handle]].add(index)
            if op.kind in COMMUNICATION - COPIES:  # a copy involves no other rank
                channel = channel_of(rank, op)
                if channel in last_on:
                    predecessors.add(last_on[channel])
                last_on[channel] = index
        self.successors: list[list[int]] = [[] for _ in tape]
        for index, others in enumerate(self.predecessors):
            others.discard(index)
            for other in others:
                self.successors[other].append(index)

    def end_of(self, index: int) -> int:
        """Return the index of the op that completes an op: its WAIT if it communicates, or itself."""
        op = self.tape[index]
        return self.waits[op.handle] if op.kind in COMMUNICATION else index

    def _note(self, index: int, op: Op, specs: Mapping[int, Spec]) -> None:
        """Record the values that an op reads and makes."""
        for number in op.outputs:
            self._available[number] = self.end_of(index)
        if op.kind is OpKind.FREE:
            return
        ended_values = {op.inputs[place] for place in op.kind.row.ends}
        for number in op.inputs:
            if number not in ended_values:
                self.readers[number].append(index)
            self._reads[number].append(index)
            self._reads[self._memory.get(number, number)].append(index)
            self._reads[specs[number].kind, specs[number].layer].append(index)

    def _overwritten_keys(self, op: Op, specs: Mapping[int, Spec]) -> list[Hashable]:
        """Return keys of the values and the memory that an op ends or overwrites.

        A new weight overwrites all older weights of its layer.
        """
        ended_values = [op.inputs[place] for place in op.kind.row.ends]
        roots = [self._memory[number] for number in ended_values if number in self._memory]
        arriving = [(Kind.WEIGHT, specs[number].layer) for number in op.outputs if _is_new_weight(specs[number])]
        return [*ended_values, *roots, *arriving]


def _is_new_weight(spec: Spec) -> bool:
    """Return whether a value is a weight that this step has updated."""
    return spec.kind is Kind.WEIGHT and spec.step > 0
