"""Seconds: the kernels of a model's layers on a cluster's device, and communication on its links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from shardlab.models.kernels import Kernel, Pointwise
from shardlab.program import Op, OpKind, Sizes, Spec, attention
from shardlab.simulate.precision import Precision
from shardlab.simulate.prices import Messages


class DeviceLike(Protocol):
    """What prices need of a device."""

    @property
    def adds_in_backward(self) -> bool: ...

    def seconds(self, kernel: Kernel, dtype: str) -> float: ...
    def overhead(self, op: str, dtype: str) -> float: ...


class ClusterLike(Protocol):
    """What prices need of a cluster."""

    @property
    def device(self) -> DeviceLike: ...
    @property
    def interference(self) -> float: ...

    def collective_seconds(self, kind: str, bytes: float, ranks: Sequence[int]) -> float: ...
    def message_seconds(self, bytes: float, source: int, target: int) -> float: ...


class ModelLike(Protocol):
    """What prices need of a model: the kernels of its layers (see `shardlab.models.Model`)."""

    @property
    def block(self) -> int: ...

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]: ...
    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, seen: float, slices: int = 1
    ) -> tuple[Kernel, ...]: ...
    def loss_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]: ...


@dataclass(frozen=True)
class ClusterPrices:
    """What a program's ops take on a cluster, in seconds.

    Attributes:
        model: whose layers are the program's.
        rows: sequences of a microbatch.
        cluster: devices and links; rank i is its i-th device.
        precision: dtype and bytes.
    """

    model: ModelLike
    rows: int
    cluster: ClusterLike
    precision: Precision

    @property
    def one_stream(self) -> bool:
        """Each process group has a stream of its own (torch.distributed's ProcessGroupNCCL)."""
        return False

    @property
    def messages(self) -> Messages:
        """A send's kernel ends when its receive has taken the data."""
        return "rendezvous"

    @property
    def interference(self) -> float:
        return self.cluster.interference

    @property
    def adds_in_backward(self) -> bool:
        return self.cluster.device.adds_in_backward

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        own = self.cluster.device.overhead(op.kind.value, self.precision.compute)
        return own if op.kind in _LOADS else own + self._kernels_time(op, specs, sizes)

    def _kernels_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        kind = op.kind
        made = specs[op.outputs[0]]
        if kind is OpKind.UPDATE:  # of its slice; counted as float32 elements
            elements = sizes.elements(made) * self.precision.moved_by_update / 4
            return self.cluster.device.seconds(Pointwise("adamw", elements, 0.0), "float32")
        if kind is OpKind.ADD:
            return self._sum([Pointwise("add", 3.0 * sizes.elements(made), 0.0)])
        if kind is OpKind.NORM:
            return self._sum([Pointwise("norm", float(sizes.elements(specs[op.inputs[0]])), 0.0)])
        read = specs[op.inputs[0]]
        sequences, tokens = self._tokens(read)
        if kind is OpKind.ATTEND or kind is OpKind.ATTEND_BACKWARD:
            forward = self._attend(op.layer, read, specs[op.inputs[1]])
            return self._sum(forward if kind is OpKind.ATTEND else _backward_input(forward))
        slices = _slices(op, specs)
        if kind is OpKind.LOSS or kind is OpKind.LOSS_STATS:
            loss = self.model.loss_kernels(sequences, tokens, slices)
            stats = () if len(op.inputs) == 2 else loss  # given, or to be found out
            return self._sum([*stats, *(() if kind is OpKind.LOSS_STATS else _backward_input(loss))])
        kernels = self.model.kernels(op.layer, sequences, tokens, slices)
        if kind is OpKind.FORWARD or kind is OpKind.RECOMPUTE:
            return self._sum(kernels)
        both = kind is OpKind.BACKWARD
        inputs = _backward_input(kernels) if both or kind is OpKind.BACKWARD_INPUT else []
        weights = [back for kernel in kernels for back in kernel.backward_weight()]
        return self._sum([*inputs, *(weights if both or kind is OpKind.BACKWARD_WEIGHT else [])])

    def collective_time(self, kind: OpKind, bytes: float, ranks: Sequence[int]) -> float:
        return self.cluster.collective_seconds(kind.value, bytes, ranks) if len(ranks) > 1 else 0.0

    def message_times(self, bytes: float, source: int, target: int) -> tuple[float, float]:
        seconds = self.cluster.message_seconds(bytes, source, target)
        return seconds, seconds

    def _sum(self, kernels: Iterable[Kernel]) -> float:
        return sum(self.cluster.device.seconds(kernel, self.precision.compute) for kernel in kernels)

    def _tokens(self, spec: Spec) -> tuple[int, int]:
        """(sequences, tokens of each) of a value made of pieces of the batch."""
        microbatches = spec.microbatches.bit_count()
        pieces = spec.holds.pieces
        return microbatches * self.rows, self.model.block * pieces // (microbatches * spec.grid.sequence)

    def _attend(self, layer: int, queries: Spec, keys_values: Spec) -> tuple[Kernel, ...]:
        """Attention's kernels where queries meet a block of keys and values."""
        sequences, asking = self._tokens(queries)
        _, asked = self._tokens(keys_values)
        half = queries.grid.sequence**2 / 2  # the pairs of slices that a whole causal sequence computes
        each = queries.microbatches.bit_count()
        pairs = queries.holds.pieces * keys_values.holds.pieces / each**2
        seen = attention.work(queries, keys_values) / each * half / pairs
        return self.model.attend_kernels(layer, sequences, asking, asked, seen, _cut(queries))


def _slices(op: Op, specs: Mapping[int, Spec]) -> int:
    """Into how many slices a layer's parameters are cut, of which one is computed here (1: all are)."""
    if op.kind is OpKind.FORWARD or op.kind is OpKind.RECOMPUTE:
        told = specs[op.outputs[0]]
    elif op.kind is OpKind.BACKWARD_WEIGHT:
        told = specs[op.inputs[2]]
    else:
        told = specs[op.inputs[3] if op.kind in _BACKWARD else op.inputs[0]]
    return _cut(told)


def _cut(spec: Spec) -> int:
    """The same, told by a value that the layer makes."""
    width = spec.grid.width
    here = (spec.sums & ((1 << width) - 1)).bit_count()
    return width // here if here else 1


def _backward_input(kernels: Iterable[Kernel]) -> list[Kernel]:
    return [back for kernel in kernels for back in kernel.backward_input()]


_LOADS = frozenset({OpKind.LOAD_WEIGHT, OpKind.LOAD_OPT_STATE, OpKind.LOAD_BATCH})
_BACKWARD = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT})
