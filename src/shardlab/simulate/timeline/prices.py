"""Prices: the interface through which a simulation asks how long ops take, and unit costs, which implement it.

`Prices` is the interface; `shardlab.simulate.predict.prices.ClusterPrices` implements it in seconds. `Costs` implements
it in the time units of the puzzles. `PriceList` asks for each price once. `Traced`, at the end, is the interface of all
programs that can be simulated.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from shardlab.language import Group, Kind, Op, OpKind, Program, Sizes, Spec
from shardlab.language.ops import COLLECTIVES, Price
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.language.rules import attention
from shardlab.language.rules.kinds import AUTOGRAD_KINDS, ROW_KINDS
from shardlab.language.rules.spec import fraction_held
from shardlab.language.tape import Communication

Messages = Literal["buffered", "link", "rendezvous"]


class Prices(Protocol):
    """Times of ops in one unit, and how communication behaves. The defaults are those of NCCL.

    Attributes:
        one_stream: whether all communication of a rank takes turns on one stream. Otherwise each communicator (a group
            or two ranks) has a stream of its own, as process groups have on NCCL.
        messages: how messages travel. "buffered": first the sender's part, then the receiver's, each on its rank's
            stream. "link": the sender's part is spent on the link, which carries any number of messages at once.
            "rendezvous": one transfer, which starts when both ranks have arrived.
        blocking_p2p: share of a message's time in which its sender computes nothing.
        contention: seconds that compute loses for each second in which a communication of its rank is in flight. It is
            0 if they do not share anything, and about 1 if they take turns on one core.
        lag: time that a rank loses beyond that when it waits for a collective or a message.
        adds_in_backward: whether the time of a BACKWARD includes adding its gradient to an older one. Then the ADD that
            the tape shows for it costs nothing (see `shardlab.check.in_place`).
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

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        """Return the time of an op that does not communicate."""
        ...

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        """Return the time of a collective from the arrival of its last member.

        Args:
            kind: the collective.
            bytes: bytes of the whole value: the one that is reduced, scattered or exchanged, or the gathered result.
            group: its members.
        """
        ...

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        """Return the sender's and the receiver's part of a message's time. In a rendezvous, both are the transfer's."""
        ...

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        """Return the time of a copy to a place outside the device, or from there."""
        ...


class PriceList:
    """Prices of a program's ops, each asked for once. There are many layers and microbatches, but few kinds of work."""

    def __init__(self, traced: Traced, prices: Prices) -> None:
        self._traced = traced
        self._prices = prices
        self._sizes = traced.program.sizes
        self._known: dict[Hashable, float] = {}
        self._messages: dict[Hashable, tuple[float, float]] = {}
        self._bytes = Bytes(self._sizes)

    def compute(self, op: Op, specs: Mapping[int, Spec]) -> float:
        """Return the time of an op that does not communicate."""
        kind, layer, inputs, outputs = op[0], op[1], op[2], op[3]
        row = kind.row
        if row.saved >= 0:
            key = (kind, specs[inputs[0]][1].bit_count(), specs[inputs[row.saved]][0])
        elif row.keeps:
            key = (kind, specs[inputs[0]][1].bit_count(), specs[outputs[0]][0])
        elif kind is _ADD:
            key = (kind, layer, _work_key(specs[outputs[0]]))
        else:
            key = (kind, layer, *[_work_key(specs[number]) for number in (*inputs, *outputs)])
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._prices.compute_time(op, specs, self._sizes)
        return time

    def collective(self, *together: Communication) -> float:
        """Return the time of a collective, or of several that run as one.

        Of each collective the bytes of the whole value count: the largest value that any member gives or receives.
        """
        tapes, bytes = self._traced.program.tapes, 0
        op = None
        for communication in together:
            most = 0
            for rank, _, at in communication.participants:
                op, specs = tapes[rank][at], self._traced.specs[rank]
                for number in (*op[2], *op[3]):
                    most = max(most, self._bytes(specs[number]))
            bytes += most
        assert op is not None
        assert op.group is not None
        key = (op[0], op.group, bytes)
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._prices.collective_time(op[0], bytes, op.group)
        return time

    def copy(self, op: Op, specs: Mapping[int, Spec]) -> float:
        """Return the time of an OFFLOAD or a RELOAD."""
        there = specs[op[3][0] if op[0] is OpKind.OFFLOAD else op[2][0]]
        key = (op[0], there.form, self._bytes(there))
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._prices.copy_time(op[0], self._bytes(there), there.form.place)
        return time

    def message(self, send: Op, row: int, specs: Mapping[int, Spec]) -> tuple[float, float]:
        """Return the sender's and the receiver's part of a message's time."""
        sent = specs[send[2][0]]
        bytes, source = self._bytes(sent), rank_of(self._traced.program, row)
        key = (sent.kind, source, send.peer, bytes)
        if key not in self._messages:
            self._messages[key] = self._prices.message_times(sent.kind, bytes, source, send.peer)
        return self._messages[key]


class Bytes:
    """Bytes of values by spec. Values of different microbatches have equal sizes, so each size is computed once.

    Attributes:
        sizes: sizes of the program.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._known: dict[Hashable, int] = {}

    def __call__(self, spec: Spec) -> int:
        form, cells = spec[0], spec[1]
        key = (form, cells.bit_count()) if form.kind in ROW_KINDS else form
        size = self._known.get(key)
        if size is None:
            size = self._known[key] = self.sizes.bytes(spec)
        return size


def _work_key(spec: Spec) -> Hashable:
    """Return the part of a value's spec that decides how much work it is.

    These are its slices and its tokens, whichever microbatch comes first. What a gradient has summed does not count.
    """
    form, cells = spec[0], spec[1]
    if form.kind not in ROW_KINDS:
        return form
    slices, first = form.space.sequence, (cells & -cells).bit_length() - 1
    return form, cells >> max(0, first - first % slices)


_ADD = OpKind.ADD


@dataclass(frozen=True)
class Costs(Prices):
    """Time units of each op; the defaults are those of the LLM Training Puzzles (Rush 2023, `Model.event`).

    Attributes:
        forward, recompute, backward_input, backward_weight: for each microbatch of the op.
        attend, attend_backward: causal attention of whole sequences, for each microbatch of the op; a block of keys
            takes its share of that.
        loss_stats, loss, add, norm, update: for each op.
        collective: for each collective, from the arrival of its last member.
        send, recv: for each message. A receive starts when its send has ended, or later.
        offload, reload: for each value that is copied to another place, or back.
        link_latency: whether a send's time is spent on the link alone, which carries any number of messages at once, as
            papers about schedules assume. Otherwise messages take the streams of both ranks, one at a time.
    """

    forward: float = 1.0
    recompute: float = 1.0
    backward_input: float = 0.5
    backward_weight: float = 0.5
    attend: float = 1.0
    attend_backward: float = 1.0
    loss_stats: float = 0.0
    loss: float = 0.0
    add: float = 0.0
    norm: float = 0.0
    update: float = 0.5
    collective: float = 0.3
    send: float = 0.2
    recv: float = 0.2
    offload: float = 0.2
    reload: float = 0.2
    link_latency: bool = False

    @property
    def backward(self) -> float:
        """Time units of an unsplit backward pass: both halves."""
        return self.backward_input + self.backward_weight

    @property
    def one_stream(self) -> bool:
        """True: messages and collectives of a rank take turns."""
        return True

    @property
    def messages(self) -> Messages:
        return "link" if self.link_latency else "buffered"

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        """Return the time units of a compute op: its microbatches count, and of half-blocks the part it computes."""
        acted_on: float = specs[op.inputs[0]].cells.bit_count() if op.inputs else 0
        if any(layer.sliced for layer in sizes.signatures) and op.inputs:
            acted_on *= _share(op, specs, sizes)
        return self.duration(op.kind, acted_on)

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        return self.collective

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        return self.send, self.recv

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return self.duration(kind, 1)

    def duration(self, kind: OpKind, microbatches: float) -> float:
        """Return the time units of an op on `microbatches` microbatches."""
        price = kind.row.price
        if price is Price.NOTHING or price is Price.BYTES:
            return 0.0
        each: float = self.collective if kind in COLLECTIVES else getattr(self, kind.value)
        return each * microbatches if price is Price.MICROBATCH else each


def _share(op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
    """Return the share of a microbatch's work that an op on half-blocks does.

    A norm counts as nothing, a body by its slices, and attention by the pairs of query and key slices.
    """
    if op.layer < sizes.layers and sizes.signatures[op.layer].name == "norm":
        return 0.0
    if op.kind is OpKind.ATTEND or op.kind is OpKind.ATTEND_BACKWARD:
        queries, keys_values = specs[op.inputs[0]], specs[op.inputs[1]]
        return float(fraction_held(queries.form)) * attention.work(queries, keys_values) / queries.cells.bit_count()
    used = [specs[number] for number in (*op.inputs, *op.outputs)]
    shares = [share for spec in used if spec.kind in _TELL_SLICES and (share := fraction_held(spec.form)) < 1]
    return float(max(shares, default=1)) / used[0].form.space.sequence


_TELL_SLICES = AUTOGRAD_KINDS | {Kind.ACTIVATION}
"""Kinds of value that tell which slices of its parameters a layer was computed with."""

PUZZLE_COSTS = Costs()


class Traced(Protocol):
    """Program that can be simulated: a checked one, or a folded one (see `shardlab.simulate.predict.folding`).

    A tape's place among the tapes is its row. Members of communications are given by their rows.
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
    """Return the number of the rank whose tape is in a row."""
    return row * (program.mesh.world // program.ranks)


def stands_for(program: Program, row: int) -> range:
    """Return the ranks for which a row stands: one, or in a folded program those of its pipeline stage."""
    each = program.mesh.world // program.ranks
    return range(row * each, (row + 1) * each)
