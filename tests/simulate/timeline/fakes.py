"""Prices, a model and a cluster that are simple enough to work out by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardlab.language import Group, Kind, Op, OpKind, Sizes, Spec
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.models.layout import Kernel, Matmul, Pointwise
from shardlab.simulate.timeline.prices import Messages


@dataclass(frozen=True)
class FakePrices:
    """A compute op takes 1, or as long as its layer's number says; communication by bytes and members."""

    by_layer: bool = False
    start: float = 0.25
    one_stream: bool = False
    messages: Messages = "rendezvous"
    blocking_p2p: float = 0.0
    contention: float = 0.0
    lag: Lag = NO_LAG
    adds_in_backward: bool = False

    def for_model(self, sizes: Sizes) -> FakePrices:
        return self

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        if not op.inputs:
            return 0.0
        return 1.0 + (op.layer % 3) / 2 if self.by_layer else 1.0

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        return self.start + bytes / 2**20 + len(group.ranks) / 8

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        seconds = self.start + bytes / 2**20
        return seconds, seconds

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return self.start + bytes / 2**22


@dataclass(frozen=True)
class FakeDevice:
    """A FLOP takes a second and an element two."""

    adds_in_backward: bool = False

    def seconds(self, kernel: Kernel, dtype: str) -> float:
        assert dtype in ("bfloat16", "float32")
        return kernel.flops + 2 * (kernel.elements if isinstance(kernel, Pointwise) else 0)

    def overhead(self, op: str, dtype: str) -> float:
        return 0.0


@dataclass(frozen=True)
class FakeCluster:
    """A collective takes a second for each byte and member, a message two for each byte."""

    device: FakeDevice = FakeDevice()
    contention: float = 0.0
    lag: Lag = NO_LAG

    def collective_seconds(self, kind: str, bytes: float, ranks: Sequence[int]) -> float:
        return bytes * len(ranks)

    def message_seconds(self, bytes: float, source: int, target: int) -> float:
        return 2 * bytes


@dataclass(frozen=True)
class FakeModel:
    """A layer is one product of (tokens, 4) by (4, 8 / slices), the loss one look at each token."""

    layers: int = 4
    seq_len: int = 16

    def entries(self, layer: int) -> int:
        return 0

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return (Matmul(sequences * tokens, 8 // slices, 4),)

    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, visible: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        return (
            (Matmul(queries, keys, 1, sequences, learned=False),)
            if visible == 1
            else (Pointwise("half", visible, 0.0),)
        )

    def loss_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return (Pointwise("loss", sequences * tokens, sequences * tokens),)
