"""Lower bounds of memory: bytes that the fullest device of a plan holds at some time.

`MemoryBounds` counts the state at the start of a backward pass when activations of most microbatches are kept: these,
the rank's slices of the model state, gathered weights, and gradients in flight. `PassHolds` has the bytes during one
backward pass of a stage, and `Sharing` the share of the model state that each rank stores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod
from typing import Literal, NamedTuple, TypeVar

from shardlab.language import Kind, OpKind
from shardlab.planner.bounds.layers import Array, LayerBounds, ShapeLayers, between
from shardlab.planner.bounds.pipelines import Pipelines
from shardlab.planner.bounds.schedule_order import Moment, Part, RankOrder
from shardlab.planner.problem import Candidate, PlanShape, blocks_of
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.predict.memory import device_memory
from shardlab.simulate.timeline.memory import Category
from shardlab.strategies.plan.plan import CUT_AXES, Plan
from shardlab.strategies.plan.rank_plan import ModelLayers
from shardlab.strategies.plan.sharding import mark_kept_weights, weight_visits
from shardlab.strategies.schedules.steps import Steps

SURE = 1 - 1e-9
"""Lower bounds are multiplied by this, since sums of numbers depend on their order."""

Amount = TypeVar("Amount", float, Array)


class ElementBytes(NamedTuple):
    """Bytes of an element of a weight, of its gradient as it is held, and of its optimizer's state."""

    weight: int
    gradient: int
    optimizer: int


class KeptOfRanks(NamedTuple):
    """What some pipeline ranks keep of microbatches when backward passes begin: (moments,) each, of all ranks.

    Attributes:
        bytes: of activations.
        summed, ended: elements of gradients of some microbatches, and of all.
        weights: elements of the rank's weights.
    """

    bytes: Array
    summed: Array
    ended: Array
    weights: Array


class MemoryBounds:
    """Lower bounds of the memory of shapes, pipelines and candidates, in bytes, with what the recipe adds."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self.problem = layers.problem
        self._layers, self._pipelines = layers, pipelines
        self._holds: dict[Hashable, list[LayerHolds]] = {}
        self._crests: dict[Hashable, float] = {}
        self._numbers: dict[str, ElementBytes] = {}
        self._most: dict[Hashable, tuple[float, float]] = {}

    def kept_of_shape(self, shape: PlanShape) -> float:
        """Bytes that the mean rank keeps at least of the first microbatch, when it has passed all of its stages."""
        word = shape.recompute
        bounds = self._layers.bounds(shape, word if word in ("none", "selective") else "full")
        return (bounds.kept[-1] + (bounds.logits if shape.mesh.pp == 1 else 0.0)) / shape.mesh.pp

    def kept_of_ranks(self, shape: PlanShape, plan: Plan) -> KeptOfRanks:
        """What pipeline ranks keep of microbatches."""
        bounds, placed = self._layers.bounds(shape, plan.recompute), self._pipelines.placed(shape, plan)
        sums = bounds.arrays.kept, bounds.arrays.halved, bounds.arrays.weights
        kept, halved, weights = (each[placed.stop] - each[placed.start] for each in sums)
        counts = self._pipelines.kept(shape, plan)
        bytes = counts.flights @ kept + counts.halves @ halved
        return KeptOfRanks(bytes, counts.summed @ weights, counts.ended @ weights, counts.own @ weights)

    def of_pipeline(self, shape: PlanShape, plan: Plan, room: float = 0.0) -> float:
        """Bytes below which no candidate with this pipeline is, however the model is shared.

        Args:
            room: fewer bytes need not be told exactly, since there is room for them.
        """
        least = inf
        for sharing in least_sharings(plan):
            least = min(least, self.reserved(max(bytes for bytes, _ in self._of_ranks(shape, plan, sharing))))
            if least <= room:
                break
        return least

    def of(self, shape: PlanShape, candidate: Candidate) -> float:
        """Bytes below which a candidate's fullest device is not."""
        plan, each = candidate.plan, candidate.plan.mesh.world // candidate.plan.mesh.pp
        sharing, numbers = sharing_of(plan), self.bytes_of(shape)
        peaks: list[Peak] = []
        orders = self._pipelines.orders(shape, plan)
        for order, (bytes, weights) in zip(orders, self._of_ranks(shape, plan, sharing), strict=True):
            by_category = {
                Category.PARAMETERS.value: int(weights * numbers.weight / sharing.parameters),
                Category.OPTIMIZER.value: int(weights * numbers.optimizer / sharing.optimizer),
                Category.GRADIENTS.value: int(weights * numbers.gradient) + 1,  # at most
            }
            peaks.append(Peak(order.rank * each, int(bytes), by_category, OpKind.BACKWARD, 0, 0))
        return device_memory(self.problem.workload(candidate), peaks).unlimited

    def reserved(self, bytes: Amount) -> Amount:
        """Bytes that a device has for so many of tensors, at least."""
        memory, on_cpu = self.problem.recipe.memory, self.problem.cluster.on_cpu
        return bytes if on_cpu else memory.reserved * bytes + memory.context_bytes

    def bytes_of(self, shape: PlanShape) -> ElementBytes:
        precision = shape.precision
        if precision.name not in self._numbers:
            gradient = self.problem.recipe.memory.held_gradient_bytes(precision.bytes(Kind.GRAD_WEIGHT))
            optimizer = precision.under(self.problem.optimizer).optimizer
            self._numbers[precision.name] = ElementBytes(precision.bytes(Kind.WEIGHT), gradient, optimizer)
        return self._numbers[precision.name]

    def _of_ranks(self, shape: PlanShape, plan: Plan, sharing: Sharing) -> Iterator[tuple[float, float]]:
        """Bytes of tensors that pipeline ranks hold at least, and elements of their weights."""
        bounds, numbers, passes = self._layers.bounds(shape, plan.recompute), self.bytes_of(shape), sharing.passes
        state = numbers.weight / sharing.parameters + numbers.optimizer / sharing.optimizer
        ranges: list[range] = []
        for order in self._pipelines.orders(shape, plan):
            key = id(bounds), id(order), numbers, passes
            if key not in self._most:
                ranges = ranges or self._pipelines.stages(shape, plan)
                stages = [ranges[stage] for stage in order.stages]
                self._most[key] = self._at_most(shape, bounds, order, stages, passes)
            most, weights = self._most[key]
            yield SURE * (weights * state + max(most, weights * numbers.gradient / sharing.late)), weights

    def _at_most(
        self, shape: PlanShape, bounds: LayerBounds, order: RankOrder, stages: list[range], sharing: Sharing
    ) -> tuple[float, float]:
        """Bytes that a rank holds beside its own slices of weights and state, and elements of its weights."""
        kept, halved = ([between(sums, stage) for stage in stages] for sums in (bounds.kept, bounds.halved))
        weights = [between(bounds.weights, stage) for stage in stages]
        weight, gradient, _ = self.bytes_of(shape)
        most = 0.0
        for moment in order.moments:
            how = sharing.held(moment, weight, gradient)
            held = sum(count * bytes for count, bytes in zip(moment.flight, kept, strict=True))
            if any(moment.halves):
                held += sum(count * bytes for count, bytes in zip(moment.halves, halved, strict=True))
            held -= (halved if moment.part == "weight" else kept)[moment.stage]
            summed = [stage for stage in moment.summed if how.gradients != "ending" or stage != moment.stage]
            held += sum(weights[stage] for stage in summed) * gradient / sharing.gradients
            held += sum(weights[stage] for stage in moment.ended) * gradient / sharing.late
            if sharing.reshard == "step":  # those of other stages, which are used again
                others = [all for stage, all in enumerate(weights) if moment.flight[stage] and stage != moment.stage]
                held += weight * sum(others)
            most = max(most, held + self._crest(shape, bounds, stages[moment.stage], how))
        return most, sum(weights)

    def _crest(self, shape: PlanShape, bounds: LayerBounds, stage: range, held: PassHolds) -> float:
        """The most that is held of a stage, and of this microbatch, during its backward pass."""
        key = id(bounds), stage, held
        if key not in self._crests:
            if key[:2] not in self._holds:
                self._holds[key[:2]] = pass_holds(bounds, blocks_of(self.problem, shape).layers, stage)
            self._crests[key] = max(held.bytes(layer) for layer in self._holds[key[:2]])
        return self._crests[key]


Gathers = Literal["", "layers", "left"]
"""Which weights of the stage are gathered: none, the layer's and those gathered ahead, or all that the pass is yet to
use."""

Gradients = Literal["", "new", "moving", "ending"]
"""Which gradients of the stage take room: none, since they are added to older ones; the pass's own; those that are
being reduced; or these, and those that will be."""


class LayerHolds(NamedTuple):
    """Memory that a rank holds during a layer's backward pass on a microbatch.

    Attributes:
        kept: bytes of this microbatch's activations, of the stage's layers, by the part of the pass.
        used, ahead: elements of gathered weights: of the layer's, and of others.
        left: elements of all weights that the pass is yet to use.
        gradients: elements of gradients, by what is done with them.
    """

    kept: Mapping[Part, float]
    used: float
    ahead: float
    left: float
    gradients: Mapping[Gradients, float]


@dataclass(frozen=True)
class PassHolds:
    """How weights and gradients are held.

    Attributes:
        part: of the pass.
        gathers, gradients: which of them, beside a rank's own slices.
        weight_bytes, gradient_bytes: of an element.
        ahead: the share of a weight that is gathered before it is used.
    """

    part: Part
    gathers: Gathers
    gradients: Gradients
    weight_bytes: float
    gradient_bytes: float
    ahead: float = 1.0

    def bytes(self, layer: LayerHolds) -> float:
        """Bytes during a layer's pass."""
        gathered = {"": 0.0, "layers": layer.used + self.ahead * layer.ahead, "left": layer.left}[self.gathers]
        gradients = layer.gradients[self.gradients] * self.gradient_bytes
        return layer.kept[self.part] + gathered * self.weight_bytes + gradients


def pass_holds(bounds: LayerBounds, model: ModelLayers, stage: range) -> list[LayerHolds]:
    """List what a rank holds during the backward pass of each of a stage's layers, the last layer first.

    Where the stage ends the model, the entry before them is of the loss.
    """
    elements = {layer: between(bounds.weights, range(layer, layer + 1)) for layer in stage}
    order = [layer for layer in reversed(stage) if elements[layer]]
    gathered, moving = _gathered(model, order, elements), _moving(model, order, elements)
    nothing, all = (0.0, 0.0), sum(elements.values())
    found: list[LayerHolds] = []
    if stage.stop == len(model.layers):
        kept = between(bounds.kept, stage) + bounds.logits
        none: dict[Gradients, float] = {"": 0.0, "new": 0.0, "moving": 0.0, "ending": all}
        found.append(
            LayerHolds({"whole": kept, "input": kept, "weight": 0.0}, *gathered.get(stage[-1], nothing), all, none)
        )
    again = {layer: run.start for run in bounds.again for layer in run}
    for layer in reversed(stage):
        first = max(again.get(layer, layer + 1), stage.start)
        kept = between(bounds.kept, range(stage.start, first)) + between(bounds.whole, range(first, layer + 1))
        halved = between(bounds.halved, range(stage.start, layer + 1))
        parts: dict[Part, float] = {
            "whole": kept,
            "input": kept + between(bounds.halved, range(layer + 1, stage.stop)),
            "weight": halved,
        }
        rest = between(bounds.weights, range(stage.start, layer))
        reduced = moving.get(layer, 0.0)
        gradients: dict[Gradients, float] = {
            "": 0.0,
            "new": all - rest,
            "moving": reduced,
            "ending": rest + reduced,
        }
        found.append(LayerHolds(parts, *gathered.get(layer, nothing), rest + elements[layer], gradients))
    return found


def _gathered(model: ModelLayers, order: Sequence[int], elements: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Elements of each layer's weight, and of those that are gathered while it computes: its block's and the next's."""
    found: dict[int, tuple[float, float]] = {}
    uses = mark_kept_weights(list(weight_visits(model, order, ())), "layer")
    for place, layer in enumerate(order):
        window: dict[int, float] = {}
        for use in uses[place:]:
            if use.run > uses[place].run + 1:
                break
            window[use.layer] = elements.get(use.layer, 0.0)
        used = window.pop(uses[place].layer)
        found[layer] = used, sum(window.values())
    return found


def _moving(model: ModelLayers, order: Sequence[int], elements: dict[int, float]) -> dict[int, float]:
    """Elements of each layer's gradient, and of those before it that are still being reduced (`GradientReducer`)."""
    blocks: dict[int, float] = {}
    for layer in order:
        block = model.reduced_with(layer)
        blocks[block] = blocks.get(block, 0.0) + elements[layer]
    room = max(blocks.values(), default=0.0)
    in_flight = deque[float]()
    found: dict[int, float] = {}
    for layer in order:
        found[layer] = elements[layer] + sum(in_flight)
        while in_flight and elements[layer] + sum(in_flight) > room:
            in_flight.popleft()
        in_flight.append(elements[layer])
    return found


@dataclass(frozen=True)
class Sharing:
    """How the ranks that see different tokens share a model.

    Attributes:
        parameters, gradients, optimizer: among how many ranks each is cut.
        late: among how many the gradients are when the last backward pass has ended.
        reshard: when gathered weights are freed ("": none is gathered).
        ahead: the share of a weight that is gathered before it is used: all, or next to nothing.
        passing: the gradients of a pass itself that take room.
        reduces: whether a layer's gradients are reduced as soon as they have all microbatches.
    """

    parameters: int
    gradients: int
    optimizer: int
    late: int
    reshard: str = ""
    ahead: float = 1.0
    passing: Gradients = ""
    reduces: bool = False

    @cached_property
    def passes(self) -> Sharing:
        """This sharing as the memory of passes sees it, so that sharings with almost the same figures share them."""
        return replace(self, parameters=1, optimizer=1, gradients=_many(self.gradients), late=_many(self.late))

    def held(self, moment: Moment, weight: float, gradient: float) -> PassHolds:
        """How a stage's weights and gradients are held during the backward pass of a moment.

        Args:
            moment: when the pass begins.
            weight, gradient: bytes of an element.
        """
        whole = self.reshard == "step" or (self.reshard == "stage" and moment.resumed)
        gathers = "" if moment.part == "weight" or not self.reshard else "left" if whole else "layers"
        passing = "" if moment.part == "input" else self.passing
        if passing == "new" and moment.ends and self.reduces:
            passing = "ending" if moment.stage in moment.summed else "moving"
        elif passing == "new" and moment.stage in moment.summed:  # to which the pass adds
            passing = ""
        return PassHolds(moment.part, gathers, passing, weight, gradient, self.ahead)


def _many(shards: int) -> int:
    """Round a number of shards above 8 to so many that a shard takes next to nothing."""
    return shards if shards <= 8 else 1 << 40


def sharing_of(plan: Plan) -> Sharing:
    """How a plan shares a model; if its schedule itself says what is gathered and reduced when, that is left out."""
    parameters, gradients, optimizer = (
        shards(plan, axes) for axes in (plan.shard_parameters, plan.shard_gradients, plan.shard_optimizer)
    )
    late = gradients if plan.reduce_at == "step" else optimizer
    sizes = plan.mesh.sizes()
    gathered = [sizes[axis] for axis in plan.shard_parameters if sizes[axis] > 1]  # the last one is gathered first
    moving = any(sizes[axis] > 1 for axis in plan.axes_of_every_microbatch if axis != "ep")
    if isinstance(plan.order, Steps):
        return Sharing(parameters, gradients, optimizer, late)
    return Sharing(
        parameters,
        gradients,
        optimizer,
        late,
        plan.reshard_after if gathered else "",
        1.0 if len(gathered) < 2 else 0.0,
        "moving" if moving else "new",
        plan.reduce_at == "layer" and any(sizes[axis] > 1 for axis in CUT_AXES),
    )


def least_sharings(plan: Plan) -> list[Sharing]:
    """Sharings that hold least: however a candidate with a plan's pipeline shares the model, one of them holds no
    more."""
    every = shards(plan, CUT_AXES)
    if isinstance(plan.order, Steps):
        return [Sharing(every, every, every, every)]
    if every == 1:
        return [Sharing(1, 1, 1, 1, passing="new")]
    return [
        Sharing(parameters, gradients, every, every, reshard, 0.0, "moving" if gradients > 1 else "new", True)
        for parameters, reshard in ((1, ""), (every, "layer"))
        for gradients in (1, every)
    ]


def shards(plan: Plan, axes: tuple[str, ...]) -> int:
    """Into how many pieces something is cut over axes."""
    sizes = plan.mesh.sizes()
    return prod(sizes[axis] for axis in axes)
