"""Costs of all layers of a model for one microbatch, estimated without a trace.

`PassCosts` has the seconds of a microbatch's passes and the bytes that they keep, for each sharding of layers and size
of microbatches. `LayerPrices` prices the kernels and the collectives of one layer. The search guesses step times from
these sums, which ignore pipelines, data parallelism and overlap.
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
from shardlab.planner.problem import Candidate, Problem, plan_layers
from shardlab.simulate.predict.prices import ClusterPrices, backward_input
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.rank_plan import Completion, Keeps, LayerPlan, model_layers
from shardlab.strategies.plan.resolve import resolve


class LayerCosts(NamedTuple):
    """Costs of one microbatch, summed over all layers as if a rank had all of them.

    Attributes:
        seconds: seconds of the forward and backward pass, with awaited collectives and recomputation.
        saved_bytes: bytes that are kept from the forward pass to the backward pass.
        block: largest number of bytes that recomputing a block adds temporarily (0: no whole block is recomputed).
        head: seconds of the last layer and the loss, which are not divided among the ranks of a pipeline.
        logits: bytes of the logits and their gradient while the loss is computed.
        weights: number of parameters of one rank after the split by tensor and expert parallelism.
    """

    seconds: float
    saved_bytes: float
    block: float
    head: float
    logits: float
    weights: float


class PassCosts:
    """Costs of the layers of a problem's plans. Each is computed once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._costs: dict[Any, LayerCosts] = {}
        self._kernels: dict[Any, Any] = {}
        self._layers: dict[Any, Mapping[int, LayerPlan]] = {}
        self._prices: dict[Any, ClusterPrices] = {}

    def of(self, line: Candidate, recompute: str) -> LayerCosts:
        """Return the costs of a line's layers.

        Args:
            line: the line. Its recomputation counts only if all of its plans have it (see `own_recompute`).
            recompute: "none", "selective", "full", or the recomputed parts of blocks.
        """
        plan, mesh = line.plan, line.plan.mesh
        key = (
            (mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep, line.micro_batch_size, line.precision.name),
            (plan.sequence_parallel, plan.recompute == "selective", recompute, plan.context, plan.ulysses_degree),
            plan.stripes,
        )
        if key not in self._costs:
            self._costs[key] = self._compute(line, recompute)
        return self._costs[key]

    def _compute(self, line: Candidate, recompute: str) -> LayerCosts:
        """Return the costs of a line's layers: resolve its plan with one pipeline stage, and price each layer."""
        workload, plan = self.problem.workload(line), line.plan
        repeated, model = workload.repeated.sample_layers[:-1], workload.sample.cut
        single = Plan(
            replace(plan.mesh, pp=1, dp_replicate=1, dp_shard=1),
            sequence_parallel=plan.sequence_parallel,
            context=plan.context,
            ulysses_degree=plan.ulysses_degree,
            recompute=recompute,
            stripes=plan.stripes,
        )
        sizes, mesh = workload.sample.sizes, plan.mesh
        cut = mesh.pp > 1, mesh.tp, mesh.cp, mesh.ep
        key = cut, plan.sequence_parallel, line.precision.name, recompute, plan.stripes
        if key not in self._layers:  # independent of the size of a microbatch
            self._layers[key] = resolve(single, sizes, mesh.ep, 0).layers
        layers = self._layers[key]
        kept_sizes = workload.sample.kept_sizes
        cuts = model_layers(sizes).pipeline_cuts
        prices = LayerPrices(line, model, self.cluster_prices(replace(line, plan=single)), sizes, layers, self._kernels)
        forward: list[float] = []
        backward: list[float] = []
        for layer in range(model.layers):
            completions, passes = layers[layer].completions, prices.seconds(layer)
            output_seconds = prices.awaited(layer, completions.output, layer + 1)
            input_seconds = prices.awaited(layer, completions.input, layer)
            backward_extra = prices.awaited(layer, completions.grad_output, layer + 1)
            backward_extra += prices.awaited(layer, completions.grad_input, layer)
            if layers[layer].keeps != "all":  # the output of a stage is not recomputed
                backward_extra += input_seconds + passes[0] + (output_seconds if layer + 1 not in cuts else 0.0)
            forward.append(input_seconds + passes[0] + output_seconds)
            backward.append(passes[1] + backward_extra)
        saved_bytes = [prices.saved_bytes(kept_sizes, layer, layers[layer].keeps) for layer in range(model.layers)]
        all_bytes = [prices.saved_bytes(kept_sizes, layer, "all") for layer in repeated]
        blocks = plan_layers(self.problem.model, plan).recomputable if recompute == "full" else ()
        weights = [sizes.weights[layer] / model.run(layer).slices for layer in range(model.layers)]
        return LayerCosts(
            seconds=sum(sum(layer_seconds[layer] for layer in repeated) for layer_seconds in (forward, backward)),
            saved_bytes=sum(saved_bytes[layer] for layer in repeated),
            block=max((sum(all_bytes[block.start : block.stop]) for block in blocks), default=0.0),
            head=forward[-1] + backward[-1],
            logits=2 * prices.activation_bytes(kept_sizes, model.layers),
            weights=sum(weights[layer] for layer in repeated),
        )

    def cluster_prices(self, candidate: Candidate) -> ClusterPrices:
        """Return the prices of a candidate's ops. Candidates with the same mesh, precision and so on share them."""
        plan = candidate.plan
        key = (plan.mesh, candidate.precision.name, plan.recompute_inside, bool(plan.shard_gradients))
        if key not in self._prices:
            self._prices[key] = self.problem.workload(candidate).sample.prices
        return self._prices[key]


GATHER = Completion("all_gather", "tp")
"""All-gather of a sequence of which each tensor-parallel rank has a slice."""


class LayerPrices:
    """Seconds and bytes of the layers of one line for one microbatch.

    Args:
        line: the line.
        model: model with the same kinds of layers, split for the line.
        prices: prices of kernels and collectives.
        sizes: sizes of the model's values.
        layers: plans of the layers on a rank.
        cache: cache that all lines of a problem share.
    """

    def __init__(
        self,
        line: Candidate,
        model: Model,
        prices: ClusterPrices,
        sizes: Sizes,
        layers: Mapping[int, LayerPlan],
        cache: dict[Any, Any],
    ) -> None:
        self.line, self.model, self.prices, self.sizes, self.layers = line, model, prices, sizes, layers
        self.plan, self.mesh, self._cache = line.plan, line.plan.mesh, cache
        self._tokens = model.seq_len // self.mesh.cp
        self._contexts, self._signatures = self.mesh.group(0, "cp").ranks, sizes.signatures

    def seconds(self, layer: int) -> tuple[float, float]:
        """Return the seconds of a layer's forward and backward pass. Those of the last layer include the loss."""
        run, last = self.model.run(layer), layer == self.model.layers - 1
        mesh, line, plan = self.mesh, self.line, self.plan
        key = (run.name, run.cut, run.layout.numel, run.attend is None, len(run.steps), last, mesh.tp, mesh.cp, mesh.ep)
        key = (*key, line.micro_batch_size, plan.sequence_parallel, line.precision.name, layer == 0)
        key = (*key, plan.recompute_inside)
        key = (*key, plan.context, plan.ulysses_degree) if run.attend is not None else key
        if key not in self._cache:
            self._cache[key] = self._price(layer)
        return self._cache[key]

    def awaited(self, layer: int, completions: tuple[Completion, ...], activation: int) -> float:
        """Return the seconds of the collectives that complete the input or the output of a layer.

        Args:
            layer: number of the layer.
            completions: the collectives.
            activation: number of the activation that they complete, or whose gradient they complete.
        """
        if activation > self.model.layers:
            return 0.0
        bytes = self.sizes.activations[activation] * self.sizes.element_bytes[Kind.ACTIVATION]
        bytes /= 1 if self._has_whole_sequences(layer) else self.mesh.cp
        return sum(
            self._collective(OpKind(verb), bytes, self.mesh.group(0, axis))
            for verb, axis in completions
            if verb != "slice" and getattr(self.mesh, axis) > 1
        )

    def saved_bytes(self, sizes: Sizes, layer: int, keeps: Keeps) -> float:
        """Return the bytes kept from a layer's forward pass to its backward pass: its input and saved values."""
        run, mesh = self.model.run(layer), self.mesh
        if keeps == "nothing":
            return 0.0
        if keeps == "input":  # including the residual stream, if blocks are split into halves
            residual = sizes.residual * sizes.element_bytes[Kind.RESIDUAL] if self._signatures[layer].carries else 0.0
            sliced = (mesh.tp if self.plan.sequence_parallel else 1) * mesh.cp
            return self.activation_bytes(sizes, layer) + residual / sliced
        shared = (mesh.tp if run.cut or self.plan.sequence_parallel else 1) * mesh.cp
        bytes = sizes.saved[layer] * sizes.element_bytes[Kind.SAVED] / shared
        if run.attend is not None:  # attention is a separate op
            for elements, kind in ((sizes.queries, Kind.QUERIES), (sizes.keys_values, Kind.KEYS_VALUES)):
                bytes += elements * sizes.element_bytes[kind] / shared
        keeps_input = not sizes.keeps_input or sizes.keeps_input[layer]
        return bytes + (self.activation_bytes(sizes, layer) if keeps_input else 0.0)

    def activation_bytes(self, sizes: Sizes, activation: int) -> float:
        """Return a rank's bytes of an activation, the input of the layer with the same number.

        Tokens (activation 0) count as 0 bytes. tp slices an activation by heads, by logits, or along the sequence.
        """
        if not activation:
            return 0.0
        gathered = GATHER in self.layers[activation - 1].completions.output
        heads = self.model.run(activation - 1).attend is not None
        sliced = heads or activation == self.model.layers or (self.plan.sequence_parallel and not gathered)
        bytes = sizes.activations[activation] * sizes.element_bytes[Kind.ACTIVATION]
        return bytes / (self.mesh.tp if sliced else 1) / self.mesh.cp

    def _has_whole_sequences(self, layer: int) -> bool:
        """Return whether a layer gets whole sequences although context parallelism splits them: routers and experts."""
        signature = self._signatures[layer]
        return "expert" in self.model.run(layer).cut or (signature.routes and not signature.carries)

    def _collective(self, kind: OpKind, bytes: float, group: Group) -> float:
        key = kind, bytes, group
        if key not in self._cache:
            self._cache[key] = self.prices.collective_time(kind, bytes, group)
        return self._cache[key]

    def _price(self, layer: int) -> tuple[float, float]:
        run, size, recipe = self.model.run(layer), self.line.micro_batch_size, self.prices.recipe
        tokens = self.model.seq_len if self._has_whole_sequences(layer) else self._tokens
        tokens //= self.mesh.tp if self.plan.sequence_parallel and not run.cut else 1
        if "expert" in run.cut:  # its tokens come from all ranks of ep
            size *= self.mesh.ep
        slices = self.prices.computed_slices(layer, run.slices)
        kernels = recipe.kernels.run(self.model.kernels(layer, size, tokens, slices))
        forward, backward = (self.prices.layer_seconds(kind, kernels) for kind in (OpKind.FORWARD, OpKind.BACKWARD))
        backward += self.prices.again_seconds(layer, size, tokens, run.slices)
        if run.attend is not None:
            attend_forward, attend_backward = self._attention(layer, run.slices)
            forward, backward = forward + attend_forward, backward + attend_backward
        if layer == self.model.layers - 1:
            loss = recipe.kernels.run(self.model.loss_kernels(size, self._tokens, run.slices))
            backward += self.prices.seconds_of([*loss, *backward_input(loss)])
        return forward, backward

    def _attention(self, layer: int, slices: int) -> tuple[float, float]:
        """Return the seconds of attention's forward and backward pass, with the exchanges between ranks of cp."""
        degree = self.plan.ulysses
        queries, pieces = self._tokens * degree, self.mesh.cp // degree if self.plan.context == "ring" else 1
        keys, size = self.model.seq_len // pieces, self.line.micro_batch_size
        recipe, cp = self.prices.recipe.kernels, self.mesh.cp
        key_share = 0.5 * (1 + recipe.cp_imbalance * (cp - 1) / cp)  # share of the keys for the busiest rank
        kernels = recipe.run(self.model.attend_kernels(layer, size, queries, keys, key_share, slices * degree))
        kinds = OpKind.ATTEND, OpKind.ATTEND_BACKWARD
        forward, backward = (pieces * self.prices.layer_seconds(kind, kernels) for kind in kinds)
        backward += pieces * self.prices.attends_again_seconds(layer, kernels)
        if self.mesh.cp > 1:
            with suppress(UserError):  # the profile lacks a collective, so such plans have no forecast
                forward, backward = self._with_exchanges(layer, degree, forward, backward)
        return forward, backward

    def _with_exchanges(self, layer: int, degree: int, forward: float, backward: float) -> tuple[float, float]:
        """Return the seconds of attention with the exchanges between ranks of cp.

        Exchanges of slices for heads, and gathers of keys and values, run before or after attention. The messages of a
        ring run concurrently with attention, one after the other.

        Args:
            layer: number of the layer.
            degree: number of adjacent ranks of cp that exchange slices of the sequence for heads.
            forward, backward: seconds of attention without exchanges.
        """
        head_group, ring = group_of("cp", self._contexts[:degree]), group_of("cp", self._contexts[::degree])
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
        if hops > 1 and self.plan.context == "all_gather":
            forward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.ALL_GATHER, hops * keys_values, ring)
            backward += self._collective(OpKind.REDUCE_SCATTER, hops * grad_keys_values, ring)
        elif hops > 1:
            one, other = ring.ranks[:2]
            _, hop = self.prices.message_times(Kind.KEYS_VALUES, keys_values, one, other)
            _, hop_back = self.prices.message_times(Kind.GRAD_KEYS_VALUES, grad_keys_values, one, other)
            forward, backward = max(forward, (hops - 1) * hop), max(backward, hops * hop_back)
        if degree > 1:
            forward_sizes = queries, keys_values, output
            backward_sizes = grad_output, grad_queries, grad_keys_values
            forward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, head_group) for bytes in forward_sizes)
            backward += sum(self._collective(OpKind.ALL_TO_ALL, bytes, head_group) for bytes in backward_sizes)
        return forward, backward
