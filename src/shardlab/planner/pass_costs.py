"""Costs of all layers of a model on one microbatch, estimated without a trace.

`PassCosts` gives the seconds of a microbatch's passes and the bytes that they keep, for each way to cut layers and
microbatches. `LayerPrices` prices the kernels and the collectives of one layer. The search guesses step times from
these sums; they ignore pipelines, data parallelism and everything that overlaps.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from shardlab.common.errors import UserError
from shardlab.language import Group, Kind, OpKind, Sizes
from shardlab.language.mesh import group_of
from shardlab.models import Model
from shardlab.planner.problem import Candidate, PlanShape, Problem, blocks_of, identical_blocks
from shardlab.simulate.predict.prices import ClusterPrices, backward_input
from shardlab.strategies.plan.rank_plan import Completion, Keeps, LayerPlan, model_layers
from shardlab.strategies.plan.resolve import resolve


class LayerCosts(NamedTuple):
    """Sums over all layers on one microbatch, on a rank that has all of them.

    Attributes:
        forward, backward: seconds of the passes, with awaited collectives and recomputation.
        kept: bytes that stay from the forward pass to the backward pass.
        block: the most bytes that recomputing one block adds for a moment (0: no block is recomputed).
        head: seconds of the last layer and the loss, which are not divided among the ranks of a pipeline.
        logits: bytes of the logits and their gradient while the loss is computed.
        weights: elements of the parameters, cut by tensor and expert parallelism.
    """

    forward: float
    backward: float
    kept: float
    block: float
    head: float
    logits: float
    weights: float

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


class PassCosts:
    """Costs of the layers of a problem's plan shapes. Each is computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._costs: dict[Any, LayerCosts] = {}
        self._kernels: dict[Any, Any] = {}
        self._resolved: dict[Any, tuple[Sizes, Mapping[int, LayerPlan]]] = {}
        self._prices: dict[Any, ClusterPrices] = {}

    def of(self, shape: PlanShape, recompute: str) -> LayerCosts:
        """Return the costs of a shape's layers.

        Args:
            shape: the shape. Its own recomputation counts only if it is "selective".
            recompute: "none", "selective" or "full".
        """
        mesh = shape.mesh
        key = (
            (mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep, shape.micro_batch_size, shape.precision.name),
            (shape.sequence_parallel, shape.recompute == "selective", recompute, shape.context, shape.ulysses_degree),
            shape.stripes,
        )
        if key not in self._costs:
            self._costs[key] = self._compute(shape, recompute)
        return self._costs[key]

    def _compute(self, shape: PlanShape, recompute: str) -> LayerCosts:
        """Resolve a plan of one pipeline stage, and price each of its layers."""
        mesh, blocks = replace(shape.mesh, pp=1, dp_shard=1), blocks_of(self.problem, shape)
        model = blocks.short
        alone = replace(shape, mesh=mesh, recompute="none").candidate
        sizes, layers = self._sizes_and_layers(shape, replace(alone.plan, recompute=recompute))
        kept_sizes = self.problem.recipe.memory.kept_sizes(
            model, sizes, shape.micro_batch_size, mesh.tp if shape.sequence_parallel else 1
        )
        cuts = model_layers(sizes).pipeline_cuts
        prices = LayerPrices(shape, model, self.cluster_prices(alone), sizes, layers, self._kernels)
        forward: list[float] = []
        backward: list[float] = []
        for layer in range(model.layers):
            completions, passes = layers[layer].completions, prices.seconds(layer)
            awaited = prices.awaited(layer, completions.output, layer + 1)
            before = prices.awaited(layer, completions.input, layer)
            beside = prices.awaited(layer, completions.grad_output, layer + 1)
            beside += prices.awaited(layer, completions.grad_input, layer)
            if layers[layer].keeps != "all":  # the output of a stage is not computed again
                beside += before + passes[0] + (awaited if layer + 1 not in cuts else 0.0)
            forward.append(before + passes[0] + awaited)
            backward.append(passes[1] + beside)
        kept = [prices.kept(kept_sizes, layer, layers[layer].keeps) for layer in range(model.layers)]
        whole = blocks.all([prices.kept(kept_sizes, layer, "all") for layer in range(model.layers)])
        again = blocks.layers.recomputable if recompute == "full" else ()
        weights = [sizes.weights[layer] / model.run(layer).slices for layer in range(model.layers)]
        return LayerCosts(
            *(sum(blocks.all(each)) for each in (forward, backward, kept)),
            block=max((sum(whole[block.start : block.stop]) for block in again), default=0.0),
            head=forward[-1] + backward[-1],
            logits=2 * prices.activation_bytes(kept_sizes, model.layers),
            weights=sum(blocks.all(weights)),
        )

    def cluster_prices(self, candidate: Candidate) -> ClusterPrices:
        """Return the prices of a candidate's ops, whatever its layers are."""
        key = (candidate.plan.mesh, candidate.precision.name)
        if key not in self._prices:
            blocks = identical_blocks(self.problem.model, candidate.plan.mesh)
            assert blocks is not None, "candidates are of models that divide"
            self._prices[key] = replace(self.problem, model=blocks.whole).workload(candidate).prices
        return self._prices[key]

    def _sizes_and_layers(self, shape: PlanShape, plan: Any) -> tuple[Sizes, Mapping[int, LayerPlan]]:
        """Return the sizes of a shape's values, and its layers as a rank runs them.

        Only the sizes depend on the size of a microbatch.
        """
        mesh, model, size = shape.mesh, blocks_of(self.problem, shape).short, shape.micro_batch_size
        cut = mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep
        key = cut, shape.sequence_parallel, shape.precision.name, plan.recompute, shape.stripes
        if key not in self._resolved:
            elements = model.sizes(1, shape.precision.bytes(Kind.ACTIVATION))
            sizes = plan.counted(shape.precision.sizes(elements, self.problem.optimizer))
            self._resolved[key] = sizes, resolve(plan, sizes, mesh.ep, 0).layers
        sizes, layers = self._resolved[key]
        whole = model.sizes(size, shape.precision.bytes(Kind.ACTIVATION))
        batch = "activations", "saved", "queries", "keys_values", "residual"
        return replace(sizes, **{name: getattr(whole, name) for name in batch}), layers


GATHER = Completion("all_gather", "tp")
"""Completion that makes a sequence whole of which tensor-parallel ranks have slices."""


class LayerPrices:
    """Seconds and bytes of the layers of one shape on one microbatch.

    Args:
        shape: the shape.
        model: a model with the same kinds of layers, cut for the shape.
        prices: prices of kernels and collectives.
        sizes: sizes of the model's values.
        layers: the layers as a rank runs them.
        known: cache that all shapes of a problem share.
    """

    def __init__(
        self,
        shape: PlanShape,
        model: Model,
        prices: ClusterPrices,
        sizes: Sizes,
        layers: Mapping[int, LayerPlan],
        known: dict[Any, Any],
    ) -> None:
        self.shape, self.model, self.prices, self.sizes, self.layers = shape, model, prices, sizes, layers
        self.mesh, self._known = shape.mesh, known
        self._tokens = model.seq_len // self.mesh.cp
        self._contexts, self._signatures = self.mesh.group(0, "cp").ranks, sizes.signatures

    def seconds(self, layer: int) -> tuple[float, float]:
        """Return seconds of a layer's forward and backward pass; the last layer's includes the loss."""
        run, last = self.model.run(layer), layer == self.model.layers - 1
        mesh, shape = self.mesh, self.shape
        key = (run.name, run.cut, run.layout.numel, run.attend is None, len(run.steps), last, mesh.tp, mesh.cp, mesh.ep)
        key = (*key, shape.micro_batch_size, shape.sequence_parallel, shape.precision.name, layer == 0)
        key = (*key, shape.context, shape.ulysses_degree) if run.attend is not None else key
        if key not in self._known:
            self._known[key] = self._price(layer)
        return self._known[key]

    def awaited(self, layer: int, completions: tuple[Completion, ...], activation: int) -> float:
        """Return seconds of the collectives that complete the input or the output of a layer."""
        if activation > self.model.layers:
            return 0.0
        bytes = self.sizes.activations[activation] * self.sizes.element_bytes[Kind.ACTIVATION]
        bytes /= 1 if self._has_whole_sequences(layer) else self.mesh.cp
        return sum(
            self._collective(OpKind(verb), bytes, self.mesh.group(0, axis))
            for verb, axis in completions
            if verb != "slice" and getattr(self.mesh, axis) > 1
        )

    def kept(self, sizes: Sizes, layer: int, keeps: Keeps) -> float:
        """Return the bytes that stay from a layer's forward pass to its backward pass: its input and saved values."""
        run, mesh = self.model.run(layer), self.mesh
        if keeps == "nothing":
            return 0.0
        if keeps == "input":  # with the residual stream, if blocks are cut in halves
            residual = sizes.residual * sizes.element_bytes[Kind.RESIDUAL] if self._signatures[layer].carries else 0.0
            sliced = (mesh.tp if self.shape.sequence_parallel else 1) * mesh.cp
            return self.activation_bytes(sizes, layer) + residual / sliced
        shared = (mesh.tp if run.cut or self.shape.sequence_parallel else 1) * mesh.cp
        saved = sizes.saved[layer] * sizes.element_bytes[Kind.SAVED] / shared
        if run.attend is not None:  # attention is an op of its own
            for elements, kind in ((sizes.queries, Kind.QUERIES), (sizes.keys_values, Kind.KEYS_VALUES)):
                saved += elements * sizes.element_bytes[kind] / shared
        keeps_input = not sizes.keeps_input or sizes.keeps_input[layer]
        return saved + (self.activation_bytes(sizes, layer) if keeps_input else 0.0)

    def activation_bytes(self, sizes: Sizes, activation: int) -> float:
        """Return the bytes of an activation as it enters its layer. Tokens, activation 0, count as nothing.

        tp slices it by heads, by logits, or along the sequence.
        """
        if not activation:
            return 0.0
        gathered = GATHER in self.layers[activation - 1].completions.output
        heads = self.model.run(activation - 1).attend is not None
        sliced = heads or activation == self.model.layers or (self.shape.sequence_parallel and not gathered)
        bytes = sizes.activations[activation] * sizes.element_bytes[Kind.ACTIVATION]
        return bytes / (self.mesh.tp if sliced else 1) / self.mesh.cp

    def _has_whole_sequences(self, layer: int) -> bool:
        """Return whether a layer gets whole sequences although context parallelism cuts them: routers and experts."""
        signature = self._signatures[layer]
        return "expert" in self.model.run(layer).cut or (signature.routes and not signature.carries)

    def _collective(self, kind: OpKind, bytes: float, group: Group) -> float:
        key = kind, bytes, group
        if key not in self._known:
            self._known[key] = self.prices.collective_time(kind, bytes, group)
        return self._known[key]

    def _price(self, layer: int) -> tuple[float, float]:
        run, size, recipe = self.model.run(layer), self.shape.micro_batch_size, self.prices.recipe
        tokens = self.model.seq_len if self._has_whole_sequences(layer) else self._tokens
        tokens //= self.mesh.tp if self.shape.sequence_parallel and not run.cut else 1
        if "expert" in run.cut:  # whose tokens come from all ranks of ep
            size *= self.mesh.ep
        kernels = recipe.kernels.run(self.model.kernels(layer, size, tokens, run.slices))
        forward, backward = (self.prices.layer_seconds(kind, kernels) for kind in (OpKind.FORWARD, OpKind.BACKWARD))
        if run.attend is not None:
            there, back = self._attention(layer, run.slices)
            forward, backward = forward + there, backward + back
        if layer == self.model.layers - 1:
            loss = recipe.kernels.run(self.model.loss_kernels(size, self._tokens, run.slices))
            backward += self.prices.seconds_of([*loss, *backward_input(loss)])
        return forward, backward

    def _attention(self, layer: int, slices: int) -> tuple[float, float]:
        """Return seconds of attention's passes, on as many blocks of keys and values as come in."""
        degree = self.shape.ulysses_degree or (self.mesh.cp if self.shape.context == "ulysses" else 1)
        queries, pieces = self._tokens * degree, self.mesh.cp // degree if self.shape.context == "ring" else 1
        keys, size = self.model.seq_len // pieces, self.shape.micro_batch_size
        recipe, cp = self.prices.recipe.kernels, self.mesh.cp
        seen = 0.5 * (1 + recipe.cp_imbalance * (cp - 1) / cp)  # by the busiest rank
        attended = recipe.run(self.model.attend_kernels(layer, size, queries, keys, seen, slices * degree))
        kinds = OpKind.ATTEND, OpKind.ATTEND_BACKWARD
        forward, backward = (pieces * self.prices.layer_seconds(kind, attended) for kind in kinds)
        if self.mesh.cp > 1:
            with suppress(UserError):  # the profile lacks a collective: then such plans have no forecast
                forward, backward = self._with_exchanges(layer, degree, forward, backward)
        return forward, backward

    def _with_exchanges(self, layer: int, degree: int, forward: float, backward: float) -> tuple[float, float]:
        """Return attention's seconds with the exchanges between ranks of cp.

        Exchanges of slices for heads, and gathers of keys and values, come before attention or after it. The messages
        of a ring run beside it, but each follows the one before.

        Args:
            layer: number of the layer.
            degree: how many neighbours exchange slices for heads.
            forward, backward: seconds of attention alone.
        """
        near, ring = group_of("cp", self._contexts[:degree]), group_of("cp", self._contexts[::degree])
        hops = len(ring.ranks)
        queries, keys_values, grad_queries, grad_keys_values, output, grad_output = (
            elements * self.sizes.element_bytes[kind] / (self.model.run(layer).slices * self.mesh.cp)
            for elements, kind in (
                (self.sizes.queries, Kind.QUERIES),
                (self.sizes.keys_values, Kind.KEYS_VALUES),
                (self.sizes.queries, Kind.GRAD_QUERIES),
                (self.sizes.keys_values, Kind.GRAD_KEYS_VALUES),
                (self.sizes.activations[layer + 1], Kind.ACTIVATION),
                (self.sizes.activations[layer + 1], Kind.GRAD_ACTIVATION),
            )
        )
        if hops > 1 and self.shape.context == "all_gather":
            forward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.REDUCE_SCATTER, hops * grad_keys_values, ring)
        elif hops > 1:
            one, other = ring.ranks[:2]
            _, hop = self.prices.message_times(Kind.KEYS_VALUES, keys_values, one, other)
            _, hop_back = self.prices.message_times(Kind.GRAD_KEYS_VALUES, grad_keys_values, one, other)
            forward, backward = max(forward, (hops - 1) * hop), max(backward, hops * hop_back)
        if degree > 1:
            there, back = (queries, keys_values, output), (grad_output, grad_queries, grad_keys_values)
            forward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, near) for bytes in there)
            backward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, near) for bytes in back)
        return forward, backward
