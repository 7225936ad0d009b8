"""Interface through which simulation asks how long things take."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Literal, Protocol

from shardlab.program import Group, Kind, Op, OpKind, Sizes, Spec
from shardlab.program.lag import NO_LAG, Lag
from shardlab.program.matching import Communication
from shardlab.rules.kind import ROW_KINDS
from shardlab.timeline.traced import Traced, rank_of

Messages = Literal["buffered", "link", "rendezvous"]


class Prices(Protocol):
    """Times of ops, in one unit: steps of the puzzles, or seconds. The rest is, unless it is said, as on NCCL.

    Attributes:
        one_stream: whether all communication of a rank takes turns on one stream. Otherwise each communicator, a group
            or two ranks, has a stream of its own, as process groups have on NCCL.
        messages: how they travel. "buffered": the sender's part comes first, then the receiver's, each on its rank's
            stream; "link": the sender's part is spent on the link, which carries any number of messages at once;
            "rendezvous": one transfer, which starts when both have come.
        blocking_p2p: the share of a message's time for which its sender computes nothing.
        contention: how much longer compute takes for each second in which a communication of its rank is in flight:
            0 where they do not meet, about 1 where they take turns on one core.
        lag: what a rank loses beside that where it waits for a collective or a message.
        adds_in_backward: whether the time of a BACKWARD has in it that its gradient is added to an older one, so that
            the ADD which the tape shows for it costs nothing (see `shardlab.check.accumulation`).
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
        """How long an op that does not communicate takes."""
        ...

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        """Time of a collective from the moment the last member has come; `bytes` is the whole value's: what is reduced,
        scattered or exchanged, the result of a gather."""
        ...

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        """The sender's part and the receiver's; in a rendezvous both are the one transfer."""
        ...

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        """Time of a copy to a place beside the device, or from there."""
        ...


class PriceList:
    """The prices of a program's ops, each asked for once: layers and microbatches are many, kinds of work are few."""

    def __init__(self, traced: Traced, prices: Prices) -> None:
        self._traced = traced
        self._prices = prices
        self._sizes = traced.program.sizes
        self._known: dict[Hashable, float] = {}
        self._messages: dict[Hashable, tuple[float, float]] = {}
        self._bytes = Bytes(self._sizes)

    def compute(self, op: Op, specs: Mapping[int, Spec]) -> float:
        """The time of an op that does not communicate."""
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
        """The time of a collective, or of several that run as one: of each the whole value counts, the largest that any
        member gives or receives."""
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
        """The time of an OFFLOAD or a RELOAD."""
        there = specs[op[3][0] if op[0] is OpKind.OFFLOAD else op[2][0]]
        key = (op[0], there.form, self._bytes(there))
        time = self._known.get(key)
        if time is None:
            time = self._known[key] = self._prices.copy_time(op[0], self._bytes(there), there.form.place)
        return time

    def message(self, send: Op, row: int, specs: Mapping[int, Spec]) -> tuple[float, float]:
        """The sender's and the receiver's part of a message."""
        sent = specs[send[2][0]]
        bytes, source = self._bytes(sent), rank_of(self._traced.program, row)
        key = (sent.kind, source, send.peer, bytes)
        if key not in self._messages:
            self._messages[key] = self._prices.message_times(sent.kind, bytes, source, send.peer)
        return self._messages[key]


class Bytes:
    """How many bytes a value has; microbatches' values are alike, so each size is computed once.

    Attributes:
        sizes: which say it.
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
    """What of a value can tell how much work it is: its slices and tokens, not what a gradient has summed.

    Of tokens it is how they lie in their sequences, whichever microbatch comes first.
    """
    form, cells = spec[0], spec[1]
    if form.kind not in ROW_KINDS:
        return form
    slices, first = form.space.sequence, (cells & -cells).bit_length() - 1
    return form, cells >> max(0, first - first % slices)


_ADD = OpKind.ADD
