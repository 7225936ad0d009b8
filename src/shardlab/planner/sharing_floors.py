"""Floors of every way in which data-parallel ranks can share a model, whatever its pipeline's order of work is.

They are means over pipeline ranks, and so no more than the fullest or slowest rank's. A rank holds its slices, and
gradients of all its layers when the last backward pass has ended; or what it keeps of the first microbatch when that
has passed all of its stages, and all gathered weights, if these are freed after their last use. What is gathered is
gathered once at least, and collectives over an axis take turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.layer_floors import ShapeLayers
from shardlab.planner.memory_floors import SURE, KeptOfRanks, MemoryFloors
from shardlab.planner.plan_shape import PlanShape
from shardlab.planner.problem import Candidate
from shardlab.planner.sharded import SHARDED, sharded
from shardlab.planner.sharing import shards
from shardlab.planner.traffic import Collective, StepTraffic, gathered_after, reduced
from shardlab.planner.way_traffic import WayTraffic, exchanged
from shardlab.strategies.plan import Plan
from shardlab.strategies.schedules.steps import Steps


@dataclass(frozen=True, eq=False)
class SharingTable:
    """The ways to share a model on a mesh; seconds and bytes of the mean pipeline rank.

    Attributes:
        ways: each way by its words, in the order of the arrays.
        state: bytes of slices of weights and of the optimizer's state: (ways,).
        whole: bytes of weights that are gathered at a time: (ways,).
        gradients: bytes of gradients when the last backward pass has ended: (ways,).
        summed: bytes of gradients of some microbatches: (ways,).
        once, often: seconds of collectives that a step has once, and at every microbatch, by their axis: (axes, ways).
        after: seconds of what follows these: (ways,).
        traffic: what is exchanged, collective by collective.
    """

    ways: Mapping[Hashable, Plan]
    state: Array
    whole: Array
    gradients: Array
    summed: Array
    once: Array
    often: Array
    after: Array
    traffic: WayTraffic

    def bytes(self, kept: float) -> Array:
        """Bytes of tensors of each way, if so many are kept of a microbatch."""
        return SURE * (self.state + np.maximum(kept + self.whole, self.gradients))

    def bytes_of_ranks(self, ranks: KeptOfRanks, mean: float) -> Array:
        """Bytes of tensors of each way on the fullest of some ranks.

        Args:
            ranks: what they keep of microbatches.
            mean: elements of the mean rank's weights.
        """
        summed, ended, weights = (each[:, None] / mean for each in (ranks.summed, ranks.ended, ranks.weights))
        kept = ranks.bytes[:, None] + summed * self.summed + ended * self.gradients
        return SURE * (weights * self.state + np.maximum(kept, weights * self.gradients)).max(axis=0)

    def seconds(self, each: int) -> Array:
        """Seconds of communication of each way with so many microbatches, and of what follows."""
        return SURE * ((self.once + each * self.often).max(axis=0, initial=0.0) + self.after)


class SharingFloors:
    """Floors of sharing on a problem's meshes, each worked out once."""

    def __init__(self, layers: ShapeLayers, memory: MemoryFloors, traffic: StepTraffic) -> None:
        self.problem = layers.problem
        self._layers, self._memory, self._traffic = layers, memory, traffic
        self._known: dict[Hashable, SharingTable] = {}

    def of(self, shape: PlanShape) -> SharingTable:
        """Every way to share the model on a shape's mesh."""
        key = shape.mesh, shape.precision.name, shape.recompute == "selective"
        if key not in self._known:
            plans = {words(plan): plan for plan in sharded(self.problem, shape.candidate.plan)}
            candidates = [Candidate(plan, 1, shape.precision) for plan in plans.values()]
            traffic = exchanged(self._layers, self._traffic, shape, candidates)
            once, often = (seconds / shape.mesh.pp for seconds in traffic.totals)
            held = np.array([self._held(shape, plan) for plan in plans.values()]).reshape(-1, 4)
            state, whole, gradients, summed = held.T
            after = np.array([self._after(shape, candidate) for candidate in candidates])
            self._known[key] = SharingTable(plans, state, whole, gradients, summed, once, often, after, traffic)
        return self._known[key]

    def _held(self, shape: PlanShape, plan: Plan) -> tuple[float, float, float, float]:
        """Bytes of one way: the columns of the table, from `state` to `summed`."""
        weights, numbers = self._weights(shape), self._memory.bytes_of(shape)
        parameters, optimizer = shards(plan, plan.shard_parameters), shards(plan, plan.shard_optimizer)
        gradients = shards(plan, plan.shard_gradients)
        kept = plan.reshard_after == "step" and parameters > 1 and not isinstance(plan.order, Steps)
        return (
            weights * (numbers.weight / parameters + numbers.optimizer / optimizer),
            weights * numbers.weight if kept else 0.0,
            weights * numbers.gradient / (gradients if plan.reduce_at == "step" else optimizer),
            weights * numbers.gradient / gradients,
        )

    def _after(self, shape: PlanShape, candidate: Candidate) -> float:
        """Seconds of one way after all else: reductions that wait for all passes, the update, gathers of weights."""
        floors, plan = self._layers.floors(shape), candidate.plan

        def took(on: Collective) -> float:
            return float(self._traffic.sums(shape, candidate, floors, on)[-1]) / shape.mesh.pp

        late = reduced(candidate, often=False) if plan.reduce_at == "step" else ()
        after = max(map(took, late), default=0.0) + sum(map(took, gathered_after(candidate)))
        optimizer = shards(plan, plan.shard_optimizer)
        return after + self._layers.prices(candidate).update_seconds(self._weights(shape) / optimizer)

    def _weights(self, shape: PlanShape) -> float:
        """Elements of the mean pipeline rank's weights."""
        return self._layers.floors(shape).weights[-1] / shape.mesh.pp


def shared_as(plan: Plan, way: Plan) -> Plan:
    """A plan whose data-parallel ranks share the model as those of another one do.

    Raises:
        UserError: its pipeline does not go together with that.
    """
    shared = {name: getattr(way, name) for name in (*SHARDED, "reshard_after", "reduce_at")}
    return replace(plan, mesh=way.mesh, **shared)


def words(plan: Plan) -> Hashable:
    """What a plan says of how its data-parallel ranks share the model."""
    shared = tuple(getattr(plan, name) for name in SHARDED)
    return plan.mesh.dp_replicate, shared, plan.reshard_after, plan.reduce_at
