"""Tapes: for each rank the ordered list of its ops in one optimizer step. All other packages read tapes.

`Op` is one entry, and `Program` has the tapes of all ranks. The second part matches ops of different ranks: each rank's
k-th communication on a *channel* is the same communication (`Matcher`, `communications_of`). A channel is a group, for
collectives; a pair (source, destination), for messages; or (rank,), for the copies of one rank. Tracing, the check,
folding and drawing all match in this way. The last part is the record of a real run of a tape (`RankRecord`).
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

from shardlab.common.errors import About
from shardlab.language.mesh import Group, Mesh
from shardlab.language.ops import COMMUNICATION, OpKind, Stream
from shardlab.language.rules.kinds import ROW_KINDS, Factor, Holds, Kind, Reduction, microbatches_text
from shardlab.language.rules.layer_rules import Rules, rules_of
from shardlab.language.rules.spec import Spec, microbatches_of
from shardlab.language.sizes import Sizes

SUM = Reduction.SUM

TIED_HEAD = "the head is tied to the embedding and has no weight of its own"
"""Reason why a program cannot load the weight of a tied head."""

TIED_HEAD_REMEDY = "it computes with weights[0], load layer 0"
"""Remedy for a program that loads the weight of a tied head."""


_new: Callable[[type[ExpectedValue], tuple[Kind, int, int]], ExpectedValue] = cast(Any, tuple).__new__
"""Constructor of an ExpectedValue without the Python call of a NamedTuple's own constructor."""


class ExpectedValue(NamedTuple):
    """Value that a receive expects: its kind, layer and microbatches (a bit set)."""

    kind: Kind
    layer: int
    microbatches: int

    @classmethod
    def of(cls, spec: Spec) -> ExpectedValue:
        """Return the expectation that a value with this spec meets."""
        form, cells, _ = spec
        space = form.space
        if form.kind not in ROW_KINDS:
            cells = spec.microbatches
        elif space.sequence > 1:
            cells = microbatches_of(cells, space)
        return _new(cls, (form.kind, form.layer, cells))

    def __str__(self) -> str:
        about = f" of {microbatches_text(self.microbatches)}" if self.microbatches else ""
        return f"{self.kind.value}[{self.layer}]{about}"


class Op(NamedTuple):
    """One entry of a tape. Values and handles are numbers, counted from 0 on each rank.

    Attributes:
        kind: the kind of op.
        layer: the layer computed on or communicated for (WAIT and FREE: -1).
        inputs: numbers of the values read. FORWARD (activation, weight[, residual]); BACKWARD and BACKWARD_INPUT
            (activation, gradient, weight, saved[, gradient of the next residual]), of a layer that projects
            (`Layer.projects`) (activation, gradient of the queries, weight, saved, gradient of keys and values);
            BACKWARD_WEIGHT (activation, gradient, saved for weight); LOSS (activation[, stats]); ATTEND (queries, keys
            and values); ATTEND_BACKWARD (queries, keys and values, attended activation, its gradient); DIRECTION
            (gradient, optimizer state[, norm]); UPDATE (gradient, weight, optimizer state[, norm][, direction]);
            BROADCAST and SCATTER (value) on the root only; BARRIER none; each other op the values that its verb takes,
            in order.
        outputs: numbers of the values made. FORWARD (activation[, residual][, saved]), of a layer that projects
            (queries, keys and values, saved); ATTEND_BACKWARD (gradients of the queries, of keys and values); BACKWARD
            (weight gradient, gradient of the activation[, of the residual]); BACKWARD_INPUT (gradient of the
            activation[, of the residual], saved for weight); LOSS (gradient of the activation; none if nothing is
            trained); UPDATE (weight, optimizer state); BROADCAST (value) on all but the root, which has it; GATHER and
            REDUCE (value) on the root only; BARRIER none.
        handle: number of the communication that this op issues, or that WAIT waits for (-1: none).
        group: the ranks that meet in a collective.
        peer: the other rank of a SEND or RECV (-1: none).
        holds: for LOAD_WEIGHT, LOAD_OPT_STATE and ZERO_GRADIENT, the slices of the output; for LOAD_BATCH, the
            microbatches or pieces of them; for SLICE, the part of the input; for FORWARD, the part of the experts to
            which tokens are dispatched (None: all experts).
        expect: the value that a RECV must deliver, or that a BROADCAST or SCATTER must deliver to a rank other than its
            root.
        batch: number of the batch of messages, or of collectives, that are issued together with this op (-1: no batch).
        root: the only rank that gives (BROADCAST, SCATTER) or receives (GATHER, REDUCE) the whole value (-1: none).
        reduction: how a REDUCE or an ALL_REDUCE combines the members' values.
        factor: the factor of a SCALE.
        dtype: the dtype to which a CAST converts ("": the dtype of the value's kind).
        place: the place to which an OFFLOAD copies, or in which the value of a LOAD_WEIGHT or LOAD_OPT_STATE lies ("":
            the device).
        offset: byte of the step's arena at which the first output begins (-1: the output has its own memory,
            allocated by the op); see `shardlab.check.buffers`.
    """

    kind: OpKind
    layer: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    handle: int = -1
    group: Group | None = None
    peer: int = -1
    holds: Holds | None = None
    expect: ExpectedValue | None = None
    batch: int = -1
    root: int = -1
    reduction: Reduction = Reduction.SUM
    factor: Factor | None = None
    dtype: str = ""
    place: str = ""
    offset: int = -1

    @property
    def about(self) -> About:
        """Name and layer of this op, for a refusal."""
        return About(str(self), self.layer)

    def __repr__(self) -> str:
        values = zip(self._fields[2:], self[2:], strict=True)
        others = "".join(f", {name}={value}" for name, value in values if value != self._field_defaults[name])
        return f"<Op {self}{others}>"

    def __str__(self) -> str:
        kind = self.kind
        if kind is OpKind.WAIT:
            return f"wait(handle {self.handle})"
        if kind is OpKind.FREE and self.inputs:  # a tape from a file may be malformed
            return f"free(value {self.inputs[0]})"
        if kind is OpKind.SEND:
            return f"send to rank {self.peer}"
        if kind is OpKind.RECV:
            return f"recv from rank {self.peer}" + (f" of {self.expect}" if self.expect else "")
        place = f" on {self.group}" if self.group else ""
        if kind is OpKind.BARRIER:
            return f"barrier{place}"
        return f"{kind.value}({'batch' if kind is OpKind.LOAD_BATCH else f'layer {self.layer}'}){place}"


_new_op: Callable[[type[Op], tuple[object, ...]], Op] = cast(Any, tuple).__new__


def compute_op(
    kind: OpKind, layer: int, inputs: tuple[int, ...], outputs: tuple[int, ...], holds: Holds | None = None
) -> Op:
    """Return a compute op, without the cost of a NamedTuple's constructor."""
    return _new_op(Op, (kind, layer, inputs, outputs, -1, None, -1, holds, None, -1, -1, SUM, None, "", "", -1))


def communication_op(
    kind: OpKind,
    layer: int,
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    handle: int,
    group: Group | None,
    peer: int,
    expect: ExpectedValue | None,
    batch: int,
    root: int = -1,
    reduction: Reduction = Reduction.SUM,
) -> Op:
    """Return a communication op, without the cost of a NamedTuple's constructor."""
    return _new_op(
        Op, (kind, layer, inputs, outputs, handle, group, peer, None, expect, batch, root, reduction, None, "", "", -1)
    )


@dataclass(frozen=True)
class Program:
    """Tapes of all ranks for one optimizer step, with their mesh and sizes.

    Attributes:
        mesh: the grid of ranks.
        microbatches: microbatches in the global batch.
        sizes: elements of every value.
        tapes: for each rank its ops, in order.
    """

    mesh: Mesh
    microbatches: int
    sizes: Sizes
    tapes: list[list[Op]] = field(repr=False)

    def __repr__(self) -> str:
        return f"<Program of {len(self.tapes)} ranks, {self.layers} layers and {self.microbatches} microbatches>"

    @property
    def ranks(self) -> int:
        return len(self.tapes)

    @property
    def layers(self) -> int:
        return self.sizes.layers

    @cached_property
    def rules(self) -> Rules:
        """Rules that derive the outputs of the program's ops."""
        return rules_of(self.sizes.signatures, self.sizes.space(self.mesh, self.microbatches), self.sizes.directed)

    def fingerprint(self) -> str:
        """Return a hash of all tapes.

        Processes compare it before training: on gloo, unequal tapes would give wrong numbers without an error.
        """
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:
        tapes = [[tuple(op) for op in tape] for tape in self.tapes]  # an op's repr leaves fields out
        text = repr((self.mesh, self.microbatches, self.sizes, tapes))
        return hashlib.sha256(text.encode()).hexdigest()


Channel = Group | tuple[int, ...]
Part = TypeVar("Part")

SEND, COLLECTIVE, COPY = OpKind.SEND, Stream.COLLECTIVE, Stream.COPY

EXCHANGES = "exchanges"
"""Key of the world's communicator, which exists before the first op. All exchanges use it."""


class Participant(NamedTuple):
    """One rank's part in a communication: its handle, and the index of the op that issues it."""

    rank: int
    handle: int
    op: int


class Communication(NamedTuple):
    """Communication with all its parts.

    Attributes:
        stream: COLLECTIVE, MESSAGE or COPY.
        group: the group of a collective (None: it is a message or a copy).
        participants: the members of a collective in group order, (sender, receiver) of a message, or the rank of a
            copy.
    """

    stream: Stream
    group: Group | None
    participants: list[Participant]


class ChannelQueue(Generic[Part]):
    """Queue of the incomplete communications of one channel, to which some rank has not issued its part yet."""

    __slots__ = ("_first_open", "_issued", "_ranks", "open", "size")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self.size = len(ranks)
        self._issued = dict.fromkeys(ranks, 0)
        self._first_open = 0
        self.open: deque[dict[int, Part]] = deque()

    def join(self, rank: int) -> dict[int, Part]:
        """Return the issued parts of this rank's next communication, by rank. The caller adds this rank's part."""
        number = self._issued[rank]
        self._issued[rank] = number + 1
        place = number - self._first_open
        if place == len(self.open):
            arrived: dict[int, Part] = {}
            self.open.append(arrived)
            return arrived
        return self.open[place]

    def pop_complete(self) -> list[Part]:
        """Remove the first open communication, which must be complete, and return its parts in the channel's order.

        Each rank's k-th part joins the k-th communication, so the first open one is always the first to be completed.
        """
        self._first_open += 1
        arrived = self.open.popleft()
        parts = [arrived[rank] for rank in self._ranks]
        arrived.clear()  # a part may refer to this dict
        return parts


class Matcher(dict[Channel, ChannelQueue[Part]]):
    """Queues by channel. The first look-up of a channel creates its queue."""

    def __missing__(self, channel: Channel) -> ChannelQueue[Part]:
        queue = self[channel] = ChannelQueue[Part](channel.ranks if isinstance(channel, Group) else channel)
        return queue

    def incomplete(self) -> Iterator[dict[int, Part]]:
        """Yield the issued parts of each incomplete communication, channel by channel."""
        for queue in self.values():
            yield from queue.open


def channel_of(rank: int, op: Op) -> Channel | None:
    """Return the channel of a communication; None if its op names neither a group nor a peer."""
    stream = op[0].row.stream
    if stream is COLLECTIVE:
        return op.group
    if stream is COPY:
        return (rank,)
    if op.peer < 0:
        return None
    return (rank, op.peer) if op[0] is SEND else (op.peer, rank)


def communications_of(
    program: Program, channel_of: Callable[[int, Op], Channel | None] = channel_of
) -> tuple[list[Communication], list[dict[int, int]]]:
    """Return all communications of a program, and for each tape a map from handle to index in that list.

    The list is sorted by the last entry of each communication's `participants`: by its rank, then by its handle. A
    message whose peer has no tape is left out.

    Args:
        program: a program without deadlocks.
        channel_of: function that returns the channel of a rank's op.
    """
    matcher = Matcher[Participant]()
    communications: list[Communication] = []
    stride = program.mesh.world // program.ranks  # folded tapes are those of each stage's first rank
    for row, tape in enumerate(program.tapes):
        rank = row * stride
        for at, op in enumerate(tape):
            if op[0] not in COMMUNICATION:
                continue
            channel = channel_of(rank, op)
            if channel is None:
                continue
            end = rank
            if isinstance(channel, tuple):
                end = channel[0] if op[0] is SEND else channel[-1]
            queue = matcher[channel]
            arrived = queue.join(end)
            arrived[end] = Participant(row, op.handle, at)
            if len(arrived) == queue.size:
                communications.append(Communication(op[0].row.stream, op.group, queue.pop_complete()))
    communications.sort(key=lambda communication: communication.participants[-1])
    index_of: list[dict[int, int]] = [{} for _ in program.tapes]
    for index, communication in enumerate(communications):
        for member in communication.participants:
            index_of[member.rank][member.handle] = index
    return communications, index_of


def communicator_of(program: Program, communication: Communication) -> Hashable:
    """Return a key of the communicator that carries a communication (as in ProcessGroupNCCL without `device_id`).

    Collectives of a group share a communicator, so do the single messages of two ranks, and so do all exchanges. The
    copies of a rank have one for each direction.
    """
    if communication.stream is COLLECTIVE:
        return communication.group
    if communication.stream is COPY:
        ((rank, _, index),) = communication.participants
        return rank, program.tapes[rank][index].kind
    if any(program.tapes[rank][index].batch >= 0 for rank, _, index in communication.participants):
        return EXCHANGES
    return frozenset(member.rank for member in communication.participants)


def queue_key(program: Program, communication: Communication) -> Hashable:
    """Return a key of the queue in which a communication waits for others on each of its ranks.

    It is the communicator's key, except that the two directions of an exchange have a queue each.
    """
    key = communicator_of(program, communication)
    return tuple(member.rank for member in communication.participants) if key is EXCHANGES else key


class OpTimes(NamedTuple):
    """Times of one op, in seconds of its process's clock. None if the step failed before that time.

    Attributes:
        start: when the rank reached the op.
        end: when the rank went on to the next op; a communication had then been issued.
        completion: for a communication, when this rank's part was complete.
    """

    start: float
    end: float | None
    completion: float | None = None


@dataclass
class StepRecord:
    """Times of one step of one rank.

    Attributes:
        began, ended: start and end of the step in seconds of its process's clock, including work that is not on the
            tape; `ended` is None if the step failed.
        ops: the times of each op, by its index on the tape.
    """

    began: float
    ended: float | None = None
    ops: dict[int, OpTimes] = field(default_factory=dict[int, OpTimes])


@dataclass
class MemoryRecord:
    """Memory of one step of one rank.

    Attributes:
        live: bytes in use at the start of each op, by the op's index on the tape and by category.
        peak: most bytes in use at any time of the step, including temporary memory of ops.
    """

    live: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    peak: int = 0


@dataclass
class RankRecord:
    """Record of a real run on one rank.

    Attributes:
        rank: the rank's number.
        offset: seconds to subtract from times of this rank's clock to get times of rank 0's clock.
        bound: the largest error of the offset, in seconds.
        steps: the timed steps; the last one may have failed.
        memory: memory of an extra step after the timed ones (None: the run recorded no such step).
    """

    rank: int
    offset: float = 0.0
    bound: float = 0.0
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    memory: MemoryRecord | None = None
