"""Floors of memory: bytes that a candidate's fullest device is sure to hold.

Counted is what the strategy that follows plans holds when a backward pass begins and activations are kept of most
microbatches: these, the rank's own slices, gathered weights, and gradients on their way.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import inf
from typing import NamedTuple, TypeVar

from shardlab.planner.arrays import Array
from shardlab.planner.layer_floors import LayerFloors, ShapeLayers, between
from shardlab.planner.pass_memory import LayerHolds, PassHolds, pass_holds
from shardlab.planner.pipelines import Pipelines
from shardlab.planner.plan_shape import PlanShape, blocks_of
from shardlab.planner.problem import Candidate
from shardlab.planner.rank_orders import RankOrder
from shardlab.planner.sharing import Sharing, least_sharings, sharing_of
from shardlab.predict.estimate import Peak
from shardlab.predict.held import held_memory
from shardlab.program import Kind, OpKind
from shardlab.strategies.plan import Plan
from shardlab.timeline.memory import Category

SURE = 1 - 1e-9
"""Floors are multiplied by this, since sums of numbers depend on their order."""

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


class MemoryFloors:
    """Floors of memory of a problem's shapes, pipelines and candidates; in bytes, with all that the recipe adds."""

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
        floors = self._layers.floors(shape, word if word in ("none", "selective") else "full")
        return (floors.kept[-1] + (floors.logits if shape.mesh.pp == 1 else 0.0)) / shape.mesh.pp

    def kept_of_ranks(self, shape: PlanShape, plan: Plan) -> KeptOfRanks:
        """What pipeline ranks keep of microbatches."""
        floors, placed = self._layers.floors(shape, plan.recompute), self._pipelines.placed(shape, plan)
        sums = floors.arrays.kept, floors.arrays.halved, floors.arrays.weights
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
        return held_memory(self.problem.workload(candidate), peaks).wanted

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
        floors, numbers, passes = self._layers.floors(shape, plan.recompute), self.bytes_of(shape), sharing.passes
        state = numbers.weight / sharing.parameters + numbers.optimizer / sharing.optimizer
        ranges: list[range] = []
        for order in self._pipelines.orders(shape, plan):
            key = id(floors), id(order), numbers, passes
            if key not in self._most:
                ranges = ranges or self._pipelines.stages(shape, plan)
                stages = [ranges[stage] for stage in order.stages]
                self._most[key] = self._at_most(shape, floors, order, stages, passes)
            most, weights = self._most[key]
            yield SURE * (weights * state + max(most, weights * numbers.gradient / sharing.late)), weights

    def _at_most(
        self, shape: PlanShape, floors: LayerFloors, order: RankOrder, stages: list[range], sharing: Sharing
    ) -> tuple[float, float]:
        """Bytes that a rank holds beside its own slices of weights and state, and elements of its weights."""
        kept, halved = ([between(sums, stage) for stage in stages] for sums in (floors.kept, floors.halved))
        weights = [between(floors.weights, stage) for stage in stages]
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
            most = max(most, held + self._crest(shape, floors, stages[moment.stage], how))
        return most, sum(weights)

    def _crest(self, shape: PlanShape, floors: LayerFloors, stage: range, held: PassHolds) -> float:
        """The most that is held of a stage, and of this microbatch, during its backward pass."""
        key = id(floors), stage, held
        if key not in self._crests:
            if key[:2] not in self._holds:
                self._holds[key[:2]] = pass_holds(floors, blocks_of(self.problem, shape).layers, stage)
            self._crests[key] = max(held.bytes(layer) for layer in self._holds[key[:2]])
        return self._crests[key]
