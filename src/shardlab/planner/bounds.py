"""Floors: seconds and bytes that no plan of a shape, or no such candidate, can go below.

A floor leaves things out, and puts nothing in: the kernels of a rank's passes follow one another, what a layer's slices
exchange is waited for at once, and before a pipeline's rank has its first microbatch, and after it has handed back its
last, the stages before it work. Left out is what may run beside all that, such as the gradients' reduction, but for the
last of it, which nothing is left to run beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from shardlab.models import CutModel, MoE
from shardlab.planner.alike import alike_blocks
from shardlab.planner.layer_prices import LayerPrices
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.space import PlanShape, blocks_of, few_of
from shardlab.predict.priced import ClusterPrices
from shardlab.program import Kind, OpKind, Sizes
from shardlab.strategies.model_layers import model_layers
from shardlab.strategies.plan import Plan
from shardlab.strategies.rank_plan import LayerPlan
from shardlab.strategies.resolve import resolve
from shardlab.strategies.schedules import Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.steps import Steps

SURE = 1 - 1e-9
"""Floors are multiplied by this, since sums of numbers depend on their order."""

UNSPLIT = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first")
"""Schedules whose backward passes hand back a gradient last of all."""


@dataclass(frozen=True)
class LayerFloors:
    """Seconds of a shape's layers on one microbatch, and bytes that they keep of it; lists are sums up to each layer.

    Attributes:
        forward, backward: seconds, with what is waited for; a share of blocks is computed again.
        kept: bytes from the forward pass to the backward pass.
        weights: elements of a rank's parameters, before they are sharded.
        logits: bytes of logits and their gradient, when the loss is computed.
        again: bytes that a block keeps which is computed again, once it has been (0: none is).
    """

    forward: list[float]
    backward: list[float]
    kept: list[float]
    weights: list[float]
    logits: float
    again: float


class RankPasses(NamedTuple):
    """What a pipeline's rank has to do.

    Attributes:
        until: seconds at least until it has done its last pass.
        after: seconds of what other ranks do after that.
        backward: seconds of its backward passes of one microbatch.
        weights: elements of its parameters, before they are sharded.
        stages: how many it has.
    """

    until: float
    after: float
    backward: float
    weights: float
    stages: int


class Floors:
    """Floors of a problem's shapes and candidates, each worked out once."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._passes: dict[Any, LayerFloors] = {}
        self._kernels: dict[Any, Any] = {}
        self._states: dict[Any, Any] = {}
        self._of_one: dict[Any, tuple[Sizes, Mapping[int, LayerPlan]]] = {}
        self._done: dict[Any, list[RankPasses]] = {}
        self._orders: dict[Any, Any] = {}
        self._priced: dict[Any, ClusterPrices] = {}

    def shape_seconds(self, shape: PlanShape) -> float:
        """Seconds below which no candidate of a shape is: the mean over pipeline ranks of their passes."""
        word = shape.recompute
        passes = self.passes(shape, word if word == "selective" else "none")
        seconds = passes.forward[-1] + passes.backward[-1]
        if shape.share:
            again = self.passes(shape, "full")
            seconds += shape.share * (again.backward[-1] - passes.backward[-1])
        return SURE * self._each(shape) * seconds / shape.mesh.pp

    def shape_bytes(self, shape: PlanShape) -> float:
        """Bytes below which no candidate's fullest rank is: everything sharded over all ranks, and one microbatch, of
        which each rank keeps its stages' part when its forward pass has ended; on the mean rank."""
        word = shape.recompute
        passes, precision = self.passes(shape, "selective" if word == "selective" else "none"), shape.precision
        state = precision.bytes(Kind.WEIGHT) + precision.under(self.problem.optimizer).optimizer
        shards = shape.mesh.dp_shard * shape.mesh.cp * shape.mesh.ep
        passes = passes if word in ("none", "selective") else self.passes(shape, "full")
        kept = passes.kept[-1] + (passes.logits if shape.mesh.pp == 1 else 0.0)
        return SURE * (passes.weights[-1] * state / shards + kept) / shape.mesh.pp

    def pipeline_seconds(self, shape: PlanShape, plan: Plan) -> float:
        """Seconds below which no candidate with this pipeline is, whatever is sharded."""
        return SURE * max(rank.until + rank.after for rank in self._ranks(shape, plan))

    def seconds(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds below which a candidate is not."""
        plan, each, prices = candidate.plan, self._each(shape), self._prices(candidate)
        floor = 0.0
        for rank in self._ranks(shape, plan):
            step = rank.until + self._adding(prices, plan, rank.weights, each)
            floor = max(floor, step + rank.after, step + self._update(prices, plan, rank.weights))
            if rank.stages == 1:
                floor = max(floor, rank.until - rank.backward + self._reducing(prices, plan, rank.weights))
        return SURE * floor

    def _ranks(self, shape: PlanShape, plan: Plan) -> list[RankPasses]:
        """What every pipeline rank has to do."""
        key = shape, plan.schedule, plan.stages_per_rank, plan.recompute
        if key not in self._done:
            passes, each = self.passes(shape, plan.recompute), self._each(shape)
            stages, held = self._stages(shape, plan)
            split = not isinstance(plan.schedule, str) or plan.schedule not in UNSPLIT
            self._done[key] = []
            for own in held:
                forward, backward, weights = (
                    sum(_between(sums, stages[stage]) for stage in own)
                    for sums in (passes.forward, passes.backward, passes.weights)
                )
                first = stages[own[0]][0]  # of its layers
                until = passes.forward[first] + each * (forward + backward)
                after = 0.0 if split else passes.backward[first]
                self._done[key].append(RankPasses(until, after, backward, weights, len(own)))
        return self._done[key]

    def bytes(self, shape: PlanShape, candidate: Candidate, *, sharded: bool = False) -> float:
        """Bytes below which a candidate's fullest rank is not; `sharded`: nor any that shares more of the model."""
        plan, precision = candidate.plan, shape.precision
        passes = self.passes(shape, plan.recompute)
        sizes = plan.mesh.sizes()
        stages, held = self._stages(shape, plan)

        def among(axes: tuple[str, ...]) -> int:
            return sizes["dp_shard"] * sizes["dp_replicate"] * sizes["cp"] if sharded else _shards(plan, axes)

        weight, gradient = precision.bytes(Kind.WEIGHT), precision.bytes(Kind.GRAD_WEIGHT)
        optimizer = precision.under(self.problem.optimizer).optimizer
        state = weight / among(plan.shard_parameters) + optimizer / among(plan.shard_optimizer)
        most = 0.0
        for own, steps in zip(held, self._in_flight(shape, plan), strict=True):
            weights = {stage: _between(passes.weights, stages[stage]) for stage in own}
            kept = {stage: _between(passes.kept, stages[stage]) for stage in own}
            gradients = {stage: weights[stage] * gradient / among(plan.shard_gradients) for stage in own}
            again = passes.again if plan.recompute == "full" else 0.0
            most_at_once = again + max(
                sum(kept[stage] * count for stage, count in flight) + sum(gradients[stage] for stage in summed)
                for flight, summed in steps
            )
            if len(stages) - 1 in own:
                most_at_once = max(most_at_once, sum(kept.values()) + passes.logits)
            least = sum(weights.values()) * gradient / among(plan.shard_optimizer)
            most = max(most, sum(weights.values()) * state + max(most_at_once, least))
        return SURE * most

    def passes(self, shape: PlanShape, recompute: str | tuple[int, ...] = "none") -> LayerFloors:
        """Seconds and bytes of the shape's layers, if so much is computed again."""
        mesh = shape.mesh
        key = (
            (mesh.tp, mesh.cp, mesh.ep, shape.micro_batch_size, shape.precision.name),
            (shape.sequence_parallel, shape.recompute == "selective", recompute, shape.context, shape.ulysses_degree),
            shape.stripes,
        )
        if key not in self._passes:
            if isinstance(recompute, tuple):
                self._passes[key] = self._some(shape, recompute)
            else:
                self._passes[key] = self._of_layers(shape, recompute)
        return self._passes[key]

    def _some(self, shape: PlanShape, recompute: tuple[int, ...]) -> LayerFloors:
        """Floors of the shape's layers, if the blocks with these numbers are computed again."""
        model, none, full = blocks_of(self.problem, shape), self.passes(shape), self.passes(shape, "full")
        again = {layer for block in recompute for layer in model.layers.recomputable[block]}
        backward, kept = (
            [
                _between(full_of if layer in again else none_of, (layer, layer + 1))
                for layer in range(len(model.layers.layers))
            ]
            for none_of, full_of in ((none.backward, full.backward), (none.kept, full.kept))
        )
        return LayerFloors(none.forward, _sums(backward), _sums(kept), none.weights, none.logits, full.again)

    def _each(self, shape: PlanShape) -> int:
        return self.problem.sequences // (shape.mesh.dp_shard * shape.mesh.ep * shape.micro_batch_size)

    def _prices(self, candidate: Candidate) -> ClusterPrices:
        """Prices of a candidate's ops, whatever its layers are."""
        key = (candidate.plan.mesh, candidate.precision.name)
        if key not in self._priced:
            blocks = alike_blocks(self.problem.model, candidate.plan.mesh)
            assert blocks is not None, "candidates are of models that divide"
            short = replace(self.problem, model=blocks.whole)
            self._priced[key] = short.workload(candidate).prices
        return self._priced[key]

    def _of_layers(self, shape: PlanShape, recompute: str | tuple[int, ...]) -> LayerFloors:
        """What resolving a plan of one pipeline stage says of each layer, priced."""
        mesh, blocks = replace(shape.mesh, pp=1, dp_shard=1), blocks_of(self.problem, shape)
        model = blocks.short
        alone = replace(shape, mesh=mesh).candidate
        plan = replace(alone.plan, recompute=recompute)
        prices = self._prices(alone)
        sizes, layers = self._resolved(shape, plan)
        kept_sizes = self.problem.recipe.memory.kept_sizes(
            model, sizes, shape.micro_batch_size, mesh.tp if shape.sequence_parallel else 1
        )
        cuts = model_layers(sizes).pipeline_cuts
        pricing = LayerPrices(shape, model, prices, sizes, self._kernels)
        forward = [pricing.forward(layer) for layer in range(model.layers)]
        outputs = [pricing.waits(layers[layer].completions.output, layer + 1) for layer in range(model.layers)]
        backward: list[float] = []
        for layer in range(model.layers):
            completions = layers[layer].completions
            seconds = pricing.backward(layer)
            seconds += pricing.waits(completions.grad_output, layer + 1) + pricing.waits(completions.grad_input, layer)
            if layers[layer].keeps != "all":  # what a stage hands on is not made again, wherever stages end
                seconds += forward[layer] + (outputs[layer] if layer + 1 not in cuts else 0.0)
            backward.append(seconds)
        kept = [pricing.kept(kept_sizes, layer, layers[layer].keeps) for layer in range(model.layers)]
        weights = [sizes.weights[layer] / pricing.slices(layer) for layer in range(model.layers)]
        seconds = [each + waited for each, waited in zip(forward, outputs, strict=True)]
        return LayerFloors(
            *(_sums(blocks.all(each)) for each in (seconds, backward, kept, weights)),
            logits=2 * pricing.given(kept_sizes, model.layers),
            again=self._kept_again(shape) if recompute == "full" else 0.0,
        )

    def _resolved(self, shape: PlanShape, plan: Plan) -> tuple[Sizes, Mapping[int, LayerPlan]]:
        """The sizes of a shape's values, and its layers as a rank runs them, which no microbatch's size changes."""
        mesh, model, size = shape.mesh, blocks_of(self.problem, shape).short, shape.micro_batch_size
        key = mesh.tp, mesh.cp, mesh.ep, shape.sequence_parallel, shape.precision.name, plan.recompute, shape.stripes
        if key not in self._of_one:
            elements = model.sizes(1, shape.precision.bytes(Kind.ACTIVATION))
            sizes = plan.counted(shape.precision.sizes(elements, self.problem.optimizer))
            self._of_one[key] = sizes, resolve(plan, sizes, mesh.ep, 0).layers
        sizes, layers = self._of_one[key]
        if isinstance(model, CutModel) and not isinstance(model.whole, MoE):
            activations, saved = (tuple(size * each for each in of) for of in (sizes.activations, sizes.saved))
        else:
            whole = model.sizes(size, shape.precision.bytes(Kind.ACTIVATION))
            activations, saved = whole.activations, whole.saved
        return replace(sizes, activations=activations, saved=saved), layers

    def _kept_again(self, shape: PlanShape) -> float:
        kept, blocks = self.passes(shape).kept, blocks_of(self.problem, shape).layers.recomputable
        return min(_between(kept, (block.start, block.stop)) for block in blocks)

    def _stages(self, shape: PlanShape, plan: Plan) -> tuple[list[tuple[int, int]], list[list[int]]]:
        """The layers at which each stage begins and ends, and the stages of each pipeline rank."""
        key = (shape.mesh.pp, plan.schedule, plan.stages_per_rank, plan.layers_per_stage, shape.mesh.tp, shape.mesh.cp)
        key = (*key, shape.mesh.ep, shape.recompute == "selective")
        if key not in self._states:
            model = blocks_of(self.problem, shape)
            bounds = plan.bounds(model.layers.pipeline_units)
            stages = list(pairwise(model.layers.pipeline_cuts[unit] for unit in bounds))
            held = [
                [stage for stage, at in enumerate(_ranks_of(plan, len(stages))) if at == rank]
                for rank in range(plan.mesh.pp)
            ]
            self._states[key] = stages, held
        return self._states[key]

    def _few(self, shape: PlanShape, plan: Plan) -> int:
        return few_of(self._each(shape), plan.mesh.pp)

    def _in_flight(self, shape: PlanShape, plan: Plan) -> list[list[Any]]:
        """Find when each pipeline rank keeps most: microbatches of each of its stages, and stages with gradients.

        Only moments after a forward pass are told, and of those at which as much is kept the last.
        """
        few = self._few(shape, plan)
        key = (shape.mesh.pp, plan.schedule, plan.stages_per_rank, few)
        if key not in self._orders:
            model = blocks_of(self.problem, shape)
            steps = plan.steps(model.layers.pipeline_units, few * plan.data_ranks)
            self._orders[key] = [_moments(order) for order in steps.of_ranks]
        return self._orders[key]

    def _adding(self, prices: ClusterPrices, plan: Plan, weights: float, each: int) -> float:
        """Adding every microbatch's gradient but the first to the sum, of what the rank has of it."""
        if each == 1 or prices.adds_in_backward:
            return 0.0
        shards = _shards(plan, plan.shard_gradients)
        return (each - 1) * prices.add_seconds(int(weights / shards))

    def _update(self, prices: ClusterPrices, plan: Plan, weights: float) -> float:
        """The optimizer's step."""
        return prices.update_seconds(weights / _shards(plan, plan.shard_optimizer))

    def _reducing(self, prices: ClusterPrices, plan: Plan, weights: float) -> float:
        """Reducing a stage's gradients once a step along the axis where that takes longest."""
        bytes = weights * prices.precision.bytes(Kind.GRAD_WEIGHT)
        times = [0.0]
        for axis in ("dp_shard", "dp_replicate", "cp"):
            if plan.mesh.sizes()[axis] > 1 and axis not in plan.axes_of_every_microbatch:
                scattered = axis in plan.shard_optimizer
                kind = OpKind.REDUCE_SCATTER if scattered else OpKind.ALL_REDUCE
                own = bytes / _shards(plan, plan.shard_optimizer if not scattered else ())
                times.append(prices.collective_time(kind, own, plan.mesh.group(0, axis)))
        return max(times)


def _ranks_of(plan: Plan, stages: int) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    order = plan.order
    if isinstance(order, Steps):
        return order.ranks_of_stages
    return tuple(order.placement(stage, plan.mesh.pp) for stage in range(stages))


def _moments(order: Any) -> list[tuple[tuple[tuple[int, int], ...], frozenset[int]]]:
    """After which forward passes most microbatches are kept, and of which stages gradients are there by then."""
    kept: dict[int, int] = {}
    summed: set[int] = set()
    found: dict[tuple[tuple[int, int], ...], frozenset[int]] = {}
    for step in order:
        if not isinstance(step, Work):
            continue
        if isinstance(step, Forward):
            kept[step.stage] = kept.get(step.stage, 0) + 1
            found[tuple(sorted(kept.items()))] = frozenset(summed)
        elif isinstance(step, Backward | BackwardInput):
            if isinstance(step, Backward):
                summed.add(step.stage)
            kept[step.stage] -= 1
        elif isinstance(step, BackwardWeight):
            summed.add(step.stage)
    most = max((sum(count for _, count in flight) for flight in found), default=0)
    return [(flight, stages) for flight, stages in found.items() if sum(count for _, count in flight) == most]


def _sums(values: list[float]) -> list[float]:
    return [0.0, *accumulate(values)]


def _between(sums: list[float], layers: tuple[int, int]) -> float:
    return sums[layers[1]] - sums[layers[0]]


def _shards(plan: Plan, axes: tuple[str, ...]) -> int:
    sizes, shards = plan.mesh.sizes(), 1
    for axis in axes:
        shards *= sizes[axis]
    return shards
