"""Prices in seconds: kernels of a model's layers on a cluster's device, and communication on the cluster's links."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

from shardlab.language import Group, Holds, Kind, Mesh, Op, OpKind, Sizes, Spec
from shardlab.language.ops import Price
from shardlab.language.pass_names import Lag
from shardlab.language.precision import Precision
from shardlab.language.recompute_names import PER_OP
from shardlab.language.rules import attention
from shardlab.language.rules.kinds import bits, bytes_of
from shardlab.language.rules.spec import fraction_held
from shardlab.models import Model
from shardlab.models.layout import FusedAttention, Kernel, Matmul, Pointwise
from shardlab.models.matrices import matrices_of
from shardlab.models.mixture import Combine, Dispatch
from shardlab.models.primitives import Linear
from shardlab.simulate.hardware import Cluster
from shardlab.simulate.hardware.collectives import nodes_of
from shardlab.simulate.predict.recipe import OWN, Recipe
from shardlab.simulate.timeline.prices import Prices


@dataclass(frozen=True)
class ClusterPrices(Prices):
    """Prices of a program's ops on a cluster, in seconds.

    Attributes:
        model: the model with the program's layers.
        micro_batch_size: sequences of a microbatch.
        cluster: devices and links; rank i is its i-th device.
        precision: dtypes and bytes.
        recipe: kernels, and overlap with communication.
        mesh: mesh of the program.
    """

    model: Model
    micro_batch_size: int
    cluster: Cluster
    precision: Precision
    recipe: Recipe = OWN
    mesh: Mesh = field(default_factory=Mesh)

    @property
    def blocking_p2p(self) -> float:
        return self.recipe.overlap.blocking_p2p

    @property
    def contention(self) -> float:
        """Seconds that compute loses for each second with communication beside it, by the profile or by the recipe."""
        return self.cluster.contention or self.recipe.overlap.contention

    @property
    def lag(self) -> Lag:
        return self.cluster.lag

    @property
    def adds_in_backward(self) -> bool:
        return self.cluster.device.adds_in_backward

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        overhead = self.cluster.device.overhead(op.kind.value, self.precision.compute)
        return overhead if op.kind.row.price is Price.NOTHING else overhead + self._kernels_time(op, specs, sizes)

    def _kernels_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        kind = op.kind
        output = specs[op.outputs[0]]
        if kind is OpKind.UPDATE:  # by the elements of the slice; counted as float32
            if output.form.place:  # the processor's products of matrices, for Muon, are not counted
                return self.cluster.host_seconds(self._moved_by_update(sizes.elements(output)))
            step = self.update_seconds(sizes.elements(output))
            return step + (self._orthogonal(op.layer, output.holds) if op.layer in sizes.directed else 0.0)
        if output.form.place:  # a sum of gradients, or a concatenation, in the host's memory
            return self.cluster.host_seconds(3 * sizes.bytes(output))
        if kind is OpKind.ADD:
            return self.add_seconds(sizes.elements(output))
        if kind.row.price is Price.BYTES:  # read and written, counted as float32 elements
            return self.cluster.device.seconds(Pointwise(kind.value, sizes.bytes(output) / 2, 0.0), "float32")
        if kind is OpKind.NORM and specs[op.inputs[0]].form.place:
            return self.cluster.host_seconds(sizes.bytes(specs[op.inputs[0]]))
        if kind is OpKind.NORM:
            return self.seconds_of([Pointwise("norm", float(sizes.elements(specs[op.inputs[0]])), 0.0)])
        first_input = specs[op.inputs[0]]
        sequences, tokens = self._tokens(first_input)
        if kind is OpKind.ATTEND or kind is OpKind.ATTEND_BACKWARD:
            forward = self._attend(op.layer, first_input, specs[op.inputs[1]])
            recomputation = self.attends_again_seconds(op.layer, forward) if kind is OpKind.ATTEND_BACKWARD else 0.0
            return recomputation + self.layer_seconds(kind, forward)
        slices = _slices(op, specs)
        if kind is OpKind.LOSS or kind is OpKind.LOSS_STATS:
            has_all = self.computed_slices(self.model.layers - 1, slices) == 1
            gathered = (
                0.0 if has_all or kind is OpKind.LOSS_STATS else self._gathered_logits_seconds(sequences * tokens)
            )
            whole = has_all or self.recipe.memory.gathers_logits
            loss = self.recipe.kernels.run(self.model.loss_kernels(sequences, tokens, 1 if whole else slices))
            stats = () if len(op.inputs) == 2 else loss  # given as an input, or to be computed
            return gathered + self.seconds_of([*stats, *(() if kind is OpKind.LOSS_STATS else backward_input(loss))])
        slices = self.computed_slices(op.layer, slices)
        kernels = self.recipe.kernels.run(self.model.kernels(op.layer, sequences, tokens, slices))
        first = kind is OpKind.BACKWARD or kind is OpKind.BACKWARD_INPUT
        recomputation = self.again_seconds(op.layer, sequences, tokens, slices) if first else 0.0
        return recomputation + self.layer_seconds(kind, kernels)

    def computed_slices(self, layer: int, slices: int) -> int:
        """Return the number of slices into which a layer's computation is cut (1: each rank computes all of it)."""
        return 1 if layer in self._whole_layers else slices

    @cached_property
    def _whole_layers(self) -> tuple[int, ...]:
        return self.recipe.kernels.whole_layers(self.mesh, self.model.layers)

    def layer_seconds(self, kind: OpKind, kernels: Sequence[Kernel]) -> float:
        """Return the seconds of a pass of a layer, or of its attention, from the kernels of its forward pass."""
        if kind in (OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.ATTEND):
            return self.seconds_of(kernels)
        if kind is OpKind.ATTEND_BACKWARD:
            fused = any(isinstance(kernel, FusedAttention) for kernel in kernels)  # it computes scores again itself
            return self.seconds_of([*(() if fused else kernels), *backward_input(kernels)])
        is_backward = kind is OpKind.BACKWARD
        inputs = backward_input(kernels) if is_backward or kind is OpKind.BACKWARD_INPUT else []
        weights = [back for kernel in kernels for back in kernel.backward_weight()]
        needed = weights if is_backward or kind is OpKind.BACKWARD_WEIGHT else []
        return self.seconds_of([*inputs, *needed])

    def again_seconds(self, layer: int, sequences: int, tokens: int, slices: int) -> float:
        """Return the seconds in which the backward pass of a layer recomputes values inside blocks.

        With per-op recomputation, torchtitan keeps the output of every second product. Shardlab's model fuses queries,
        keys and values, and gate and up, so half of the time of each product is counted. Recomputation by modules or
        policies runs their primitives again, with their communication: sums over tensor-parallel ranks, and exchanges
        between experts' ranks. Sums of experts' slices are left out.

        Args:
            layer: number of the layer.
            sequences, tokens: number of sequences, and number of tokens of each on this rank.
            slices: number of slices of the layer's parameters, one of which is computed.
        """
        word = self.recipe.memory.saved.again
        if not word:
            return 0.0
        run = self.model.run(layer)
        if word == PER_OP:
            kernels = self.recipe.kernels.run(run.kernels(sequences, tokens, slices))
            products = [kernel for kernel in kernels if isinstance(kernel, Matmul) and kernel.learned]
            others = [kernel for kernel in kernels if isinstance(kernel, Pointwise)]
            halves = sum(self.seconds_of([kernel]) for kernel in products) / 2
            return halves + sum(self.seconds_of([kernel]) for kernel in others)
        recomputed = self.model.recomputed(layer, word)
        primitives = [run.steps[number].primitive for number in sorted(recomputed.again)]
        seconds = self.seconds_of(self.recipe.kernels.run(run.kernels(sequences, tokens, slices, recomputed.again)))
        width = bytes_of(self.precision.dtype(Kind.ACTIVATION))
        for primitive in primitives:
            if isinstance(primitive, Linear) and run.pieces.get(primitive.in_index, 1) > 1:
                bytes = sequences * tokens * primitive.outputs * width
                seconds += self.collective_time(OpKind.ALL_REDUCE, bytes, self.mesh.group(0, "tp"))
            elif isinstance(primitive, Dispatch | Combine) and self.mesh.ep > 1:
                bytes = primitive.router.places(sequences * tokens) * primitive.router.hidden_size * width
                seconds += self.collective_time(OpKind.ALL_TO_ALL, bytes, self.mesh.group(0, "ep"))
        return seconds

    def attends_again_seconds(self, layer: int, kernels: Sequence[Kernel]) -> float:
        """Return the seconds in which attention's backward pass, a separate op, recomputes its forward kernels."""
        word = self.recipe.memory.saved.again
        recomputes_modules = bool(word) and word != PER_OP
        return (
            self.seconds_of(kernels) if recomputes_modules and self.model.recomputed(layer, word).attends_again else 0.0
        )

    def update_seconds(self, elements: float) -> float:
        """Return the seconds of the optimizer's step on `elements` elements on a device, without Muon's products."""
        return self.cluster.device.seconds(Pointwise("adamw", self._moved_by_update(elements) / 4, 0.0), "float32")

    def _moved_by_update(self, elements: float) -> float:
        """Return the bytes that the optimizer's step moves."""
        bytes_per_element = self.recipe.kernels.update_bytes
        return elements * (self.precision.moved_by_update if bytes_per_element is None else bytes_per_element)

    def _orthogonal(self, layer: int, holds: Holds) -> float:
        """Return the seconds to orthogonalize every matrix of which the rank's slices have a part."""
        dtype = "bfloat16" if "bfloat16" in self.cluster.device.flops else self.precision.compute
        length = self.model.layout(layer).padded(holds.of)
        ranges = [(piece * length // holds.of, (piece + 1) * length // holds.of) for piece in bits(holds.mask)]
        return sum(
            self.cluster.device.seconds(kernel, dtype)
            for matrix in matrices_of(self.model.run(layer), length)
            if any(start < begin + matrix.size and begin < stop for begin in matrix.starts for start, stop in ranges)
            for kernel in matrix.kernels()
        )

    def _gathered_logits_seconds(self, tokens: int) -> float:
        """Return the seconds in which a tensor-parallel rank gathers logits of `tokens` tokens (0: it gathers none)."""
        if not self.recipe.memory.gathers_logits:
            return 0.0
        bytes = tokens * self.model.logits * bytes_of(self.precision.dtype(Kind.ACTIVATION))
        return self.cluster.collective_seconds("all_gather", bytes, self.mesh.group(0, "tp").ranks)

    def collective_time(self, kind: OpKind, bytes: float, group: Group) -> float:
        if len(group.ranks) == 1:
            return 0.0
        data = group.axis in _DATA_AXES
        joined_bytes = max(bytes, self.recipe.overlap.at_once(kind)) if data else bytes
        whole_too = self.recipe.overlap.allreduce_sharded_gradients and kind is OpKind.REDUCE_SCATTER and data
        collective = "all_reduce" if whole_too else kind.value
        seconds = self.cluster.collective_seconds(collective, joined_bytes, group.ranks)
        if group.axis == "tp":
            seconds = seconds * self.recipe.overlap.tp_traffic + self.recipe.overlap.tp_seconds
        share = bytes / joined_bytes if joined_bytes else 1.0
        return seconds * share * (1.0 - self.recipe.overlap.share.get(group.axis, 0.0))

    def copy_time(self, kind: OpKind, bytes: float, place: str) -> float:
        return self.cluster.copy_seconds(bytes, place)

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        if self.recipe.overlap.sends_residual_only and value in _RESIDUALS:
            return 0.0, 0.0
        gathered, slices = 0.0, self.mesh.tp
        if self.recipe.overlap.scatter_gather_p2p and slices > 1:
            gathered = self.cluster.collective_seconds("all_gather", bytes, self.mesh.group(0, "tp").ranks)
            bytes /= slices
        links = _ring(self.mesh, source, target)
        seconds = max(self.cluster.message_seconds(bytes, *link) for link in links) + gathered
        return seconds, seconds

    def add_seconds(self, elements: int) -> float:
        """Return the seconds of adding a gradient, in the dtype of its computation, to those of other microbatches."""
        if self.recipe.kernels.fused_accumulation:
            return 0.0
        bytes_computed = max(2, bytes_of(self.precision.compute))  # no gradient is computed in less than two bytes
        bytes = elements * (bytes_computed + 2 * self.precision.bytes(Kind.GRAD_WEIGHT))
        return self.cluster.device.seconds(Pointwise("add", bytes / 4, 0.0), "float32")

    def seconds_of(self, kernels: Iterable[Kernel]) -> float:
        """Return the seconds of consecutive kernels, at least the host's seconds to launch them."""
        kernels = list(kernels)
        busy = sum(self.cluster.device.seconds(kernel, self.precision.compute) for kernel in kernels)
        host = self.host_seconds
        return max(busy, host * sum(isinstance(kernel, Matmul) for kernel in kernels)) if host else busy

    @cached_property
    def host_seconds(self) -> float:
        """Seconds in which a rank's host launches a product of matrices and the other kernels around it."""
        kernels, pipeline = self.recipe.kernels, self.mesh.group(0, "pp").ranks
        if not kernels.piped_host_seconds or nodes_of(pipeline, self.cluster.per_node)[0] == 1 or self.mesh.tp == 1:
            return kernels.host_seconds
        return kernels.host_seconds + kernels.piped_host_seconds * self.mesh.tp

    def _tokens(self, spec: Spec) -> tuple[int, int]:
        """Return (sequences, tokens of each) of a value that consists of cells of the batch."""
        microbatches = spec.microbatches.bit_count()
        cells = spec.cells.bit_count()
        return microbatches * self.micro_batch_size, self.model.seq_len * cells // (
            microbatches * spec.form.space.sequence
        )

    def _attend(self, layer: int, queries: Spec, keys_values: Spec) -> list[Kernel]:
        """Return the kernels of attention of queries to a block of keys and values."""
        sequences, query_tokens = self._tokens(queries)
        _, key_tokens = self._tokens(keys_values)
        causal_pairs = queries.form.space.sequence**2 / 2  # the pairs of slices that a whole causal sequence computes
        microbatches = queries.microbatches.bit_count()
        pairs = queries.cells.bit_count() * keys_values.cells.bit_count() / microbatches**2
        busiest = 1 + self.recipe.kernels.cp_imbalance * (self.mesh.cp - 1) / self.mesh.cp
        key_share = busiest * attention.work(queries, keys_values) / microbatches * causal_pairs / pairs
        slices = _of_width(queries)
        return self.recipe.kernels.run(
            self.model.attend_kernels(layer, sequences, query_tokens, key_tokens, key_share, slices)
        )


def _slices(op: Op, specs: Mapping[int, Spec]) -> int:
    """Return the number of slices of a layer's parameters. The op computes with one of them (1: the whole layer)."""
    row = op.kind.row
    if row.keeps is Kind.SAVED:
        return _of_width(specs[op.outputs[0]])
    return _of_width(specs[op.inputs[max(row.saved_input, 0)]])


def _of_width(spec: Spec) -> int:
    """Return the ratio of the size of the whole value to the size of the part in `spec` (1: it is the whole)."""
    share = fraction_held(spec.form)
    return share.denominator // share.numerator


@cache
def _ring(mesh: Mesh, source: int, target: int) -> tuple[tuple[int, int], ...]:
    """Return the links for which a message waits: its own; in a ring of context-parallel ranks, those of all members.

    Each member passes on what it receives, so all run at the pace of the slowest link, whichever rank is priced.
    """
    ranks = mesh.group(source, "cp").ranks if max(source, target) < mesh.world else ()
    if source == target or target not in ranks:
        return ((source, target),)
    offset = ranks.index(target) - ranks.index(source)
    return tuple([(rank, ranks[(place + offset) % len(ranks)]) for place, rank in enumerate(ranks)])


def backward_input(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Return the kernels that compute the gradients of the inputs of some kernels."""
    return [back for kernel in kernels for back in kernel.backward_input()]


_DATA_AXES = frozenset({"dp_shard", "dp_replicate", "cp"})
_RESIDUALS = frozenset({Kind.RESIDUAL, Kind.GRAD_RESIDUAL})
