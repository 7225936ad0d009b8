"""Prices: the interface that gives a simulation the duration of ops.

`Prices` is the interface. `shardlab.simulate.predict.prices.ClusterPrices` implements it in seconds. The classes in
`shardlab.simulate.timeline.costs` implement it in abstract time units, such as the forward pass of one microbatch
through one layer. `PriceList` caches prices. `Traced`, at the end, is the interface of all programs that can be
simulated.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal, Protocol

from shardlab.language import Group, Kind, Op, OpKind, Program, Sizes, Spec
from shardlab.language.mesh import axes_between
from shardlab.language.ops import COLLECTIVES
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.tape import Communication

Messages = Literal["buffered", "full duplex", "link", "rendezvous"]

Awaited = tuple[OpKind, str]
"""Kind and axis of communications for which ranks wait. All messages have the kind SEND."""


class Prices(Protocol):
    """Durations of ops in one unit, and properties of communication. The defaults are those of NCCL.

    Attributes:
        one_stream: whether all communication of a rank takes turns on one stream. Otherwise each communicator (a group
            or two ranks) has a separate stream, as process groups have on NCCL.
        messages: how messages travel. "buffered": first the sender's part, then the receiver's, each on its rank's
            stream. "full duplex": one transfer, which starts when it is sent; each rank sends one message at a time,
            and receives one at a time. "link": the sender's part is latency of the link, which carries any number of
            messages at once. "rendezvous": one transfer, which starts when both ranks have arrived.
        blocking_p2p: share of a message's time in which its sender does not compute.
        contention: seconds that a rank loses for each second in which it computes while a communication that it awaits
            later is in flight: 0 if the two share no resource, about 1 if they take turns on one core.
        lag: time that a rank loses at a wait for a collective or a message, in addition to the wait and `contention`.
        adds_in_backward: whether the time of a BACKWARD includes adding its gradient to an older one. The corresponding
            ADD on the tape then takes no time (see `shardlab.check.in_place`).
    """

    @property
    def one_stream(self) -> bool:
        return False

    @property
    def messages(self) -> Messages:
        return "rendezvous"

    @property
    def blocking_p2p(self) -> float:
        return 0.0

    @property
    def contention(self) -> float:
        return 0.0

    @property
    def lag(self) -> Lag:
        return NO_LAG

    @property
    def adds_in_backward(self) -> bool:
        return False

    def for_model(self, sizes: Sizes) -> Prices:
        """Return the prices for programs of a model. They differ from `self` if the model defines the time unit."""
        return self

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        """Return the time of an op that does not communicate."""
        ...

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        """Return the time of a collective from the arrival of its last member.

        Args:
            kind: the collective.
            bytes: bytes of the whole value: the reduced, scattered or exchanged value, or the gathered result.
            group: the members.
        """
        ...

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        """Return the time of a message on its sender and on its receiver. In a rendezvous, both are the transfer."""
        ...

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        """Return the time of a copy to a place outside the device, or from there."""
        ...


class PriceList:
    """Cached prices of a program's ops. There are many layers and microbatches, but few kinds of work."""

    def __init__(self, traced: Traced, prices: Prices) -> None:
        self._traced = traced
        self._sizes = traced.program.sizes
        self._prices = prices.for_model(self._sizes)
        self._cache: dict[Hashable, float] = {}
        self._messages: dict[Hashable, tuple[float, float]] = {}
        self._bytes = Bytes(self._sizes)

    def compute(self, op: Op, specs: Mapping[int, Spec]) -> float:
        """Return the time of an op that does not communicate."""
        kind, layer, inputs, outputs = op[0], op[1], op[2], op[3]
        row = kind.row
        if row.saved_input >= 0:
            key = (kind, specs[inputs[0]][1].bit_count(), specs[inputs[row.saved_input]][0])
        elif row.keeps:
            key = (kind, specs[inputs[0]][1].bit_count(), specs[outputs[0]][0])
        elif kind is _ADD:
            key = (kind, layer, _work_key(specs[outputs[0]]))
        else:
            key = (kind, layer, *[_work_key(specs[number]) for number in (*inputs, *outputs)])
        time = self._cache.get(key)
        if time is None:
            time = self._cache[key] = self._prices.compute_time(op, specs, self._sizes)
        return time

    def collective(self, *batch: Communication) -> float:
        """Return the time of a collective, or of several that run as one.

        Each collective counts with the bytes of the whole value: the largest input or output of a member.
        """
        tapes, bytes = self._traced.program.tapes, 0
        op = None
        for communication in batch:
            largest = 0
            for rank, _, index in communication.participants:
                op, specs = tapes[rank][index], self._traced.specs[rank]
                for number in (*op[2], *op[3]):
                    largest = max(largest, self._bytes(specs[number]))
            bytes += largest
        assert op is not None
        assert op.group is not None
        key = (op[0], op.group, bytes)
        time = self._cache.get(key)
        if time is None:
            time = self._cache[key] = self._prices.collective_time(op[0], bytes, op.group)
        return time

    def copy(self, op: Op, specs: Mapping[int, Spec]) -> float:
        """Return the time of an OFFLOAD or a RELOAD."""
        host_spec = specs[op[3][0] if op[0] is OpKind.OFFLOAD else op[2][0]]
        key = (op[0], host_spec.form, self._bytes(host_spec))
        time = self._cache.get(key)
        if time is None:
            time = self._cache[key] = self._prices.copy_time(op[0], self._bytes(host_spec), host_spec.form.place)
        return time

    def message(self, send: Op, row: int, specs: Mapping[int, Spec]) -> tuple[float, float]:
        """Return the time of a message on its sender and on its receiver."""
        message = specs[send[2][0]]
        bytes, source = self._bytes(message), rank_of(self._traced.program, row)
        key = (message.kind, source, send.peer, bytes)
        if key not in self._messages:
            self._messages[key] = self._prices.message_times(message.kind, bytes, source, send.peer)
        return self._messages[key]


class Bytes:
    """Bytes of values by spec. Values of different microbatches have equal sizes, so each size is computed once.

    Attributes:
        sizes: sizes of the program.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._cache: dict[Hashable, int] = {}

    def __call__(self, spec: Spec) -> int:
        form, cells = spec[0], spec[1]
        key = (form, cells.bit_count()) if form.kind in ROW_KINDS else form
        size = self._cache.get(key)
        if size is None:
            size = self._cache[key] = self.sizes.bytes(spec)
        return size


def _work_key(spec: Spec) -> Hashable:
    """Return the part of a value's spec on which the work of an op depends.

    It consists of the value's form and its cells (microbatches, or slices of their sequences), with cells counted from
    the value's first microbatch. The contributions that a gradient sums make no difference.
    """
    form, cells = spec[0], spec[1]
    if form.kind not in ROW_KINDS:
        return form
    slices, first = form.space.sequence, (cells & -cells).bit_length() - 1
    return form, cells >> max(0, first - first % slices)


_ADD = OpKind.ADD


class Traced(Protocol):
    """Program that can be simulated: a checked program, or a folded one (see `shardlab.simulate.predict.folding`).

    The position of a tape among the tapes is its row. In a checked program it is the number of a rank. In a folded
    program a row stands for all ranks of a pipeline stage. Members of communications are given by their rows.
    """

    @property
    def program(self) -> Program: ...
    @property
    def specs(self) -> Sequence[Mapping[int, Spec]]: ...
    @property
    def communications(self) -> Sequence[Communication]: ...
    @property
    def communication_of(self) -> Sequence[Mapping[int, int]]: ...


def rank_of(program: Program, row: int) -> int:
    """Return the number of the rank to which a row's tape belongs."""
    return row * (program.mesh.world // program.ranks)


def awaited_by(program: Program, row: int, op: Op) -> Awaited:
    """Return the kind and the axis of a communication.

    The axis of a message is the one along which its two ranks differ, or `world` if they differ along several.
    """
    if op.group is not None:
        return op.kind, op.group.axis
    axes = axes_between(program.mesh, rank_of(program, row), op.peer)
    return OpKind.SEND, axes[0] if len(axes) == 1 else "world"


def awaited_text(awaited: Awaited) -> str:
    """Return a kind of communication as text, such as `all-gather on tp` or `message on pp`."""
    kind, axis = awaited
    return f"{kind.row.hyphenated if kind in COLLECTIVES else 'message'} on {axis}"


def stands_for(program: Program, row: int) -> range:
    """Return the ranks that a row represents: one, or in a folded program all ranks of a pipeline stage."""
    ranks_per_row = program.mesh.world // program.ranks
    return range(row * ranks_per_row, (row + 1) * ranks_per_row)
