"""Floors of what the ranks that see different tokens exchange: gathered weights and reduced gradients, in seconds.

Collectives of one axis take turns. So together they are a floor of a step, whatever runs beside them; and what comes
after the last backward pass is added to it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from shardlab.planner.layer_floors import LayerFloors, ShapeLayers, between
from shardlab.planner.memory_floors import shards
from shardlab.planner.problem import Candidate
from shardlab.planner.rank_orders import Pipelines, RankOrder, StageVisits
from shardlab.planner.space import PlanShape, blocks_of
from shardlab.program import Kind, OpKind
from shardlab.strategies.model_layers import ModelLayers
from shardlab.strategies.plan import CUT_AXES, Plan
from shardlab.strategies.schedules.steps import Steps


class RankTraffic(NamedTuple):
    """What a pipeline rank exchanges with those that see other tokens, and does with gradients; in seconds.

    Attributes:
        rank: its place.
        beside: gradients added to their sum, and gathers that are waited for, beside the passes.
        busiest: collectives over the axis that has most of them.
        last: reductions that start in the last backward pass, over the axis where they take longest.
        update: all that comes after: reductions that wait so long, the optimizer's step, gathered weights.
    """

    rank: int
    beside: float
    busiest: float
    last: float
    update: float


class Collective(NamedTuple):
    """A collective on the weights of every layer, or on their gradients.

    Attributes:
        kind, axis: which, and over which axis.
        bytes: for each element of a layer's parameters.
    """

    kind: OpKind
    axis: str
    bytes: float


class StepTraffic:
    """StepTraffic of a problem's candidates."""

    def __init__(self, layers: ShapeLayers, pipelines: Pipelines) -> None:
        self.problem = layers.problem
        self._layers, self._pipelines = layers, pipelines
        self._known: dict[Hashable, list[float]] = {}

    def of_ranks(self, shape: PlanShape, candidate: Candidate) -> list[RankTraffic]:
        """StepTraffic of every pipeline rank of a candidate."""
        plan, ranges = candidate.plan, self._pipelines.stages(shape, candidate.plan)
        each, prices = self._pipelines.each(shape), self._layers.prices(candidate)
        floors = self._layers.floors(shape, plan.recompute)
        gathers = [(on.axis, self.sums(shape, candidate, floors, on)) for on in gathered(candidate)]
        often, once = (
            [(on.axis, self.sums(shape, candidate, floors, on)) for on in reduced(candidate, often=often)]
            for often in (True, False)
        )
        after = [self.sums(shape, candidate, floors, on) for on in gathered_after(candidate)]
        late = plan.reduce_at == "step"
        model = blocks_of(self.problem, shape).layers
        found: list[RankTraffic] = []
        for order in self._pipelines.orders(shape, plan):
            stages = [ranges[stage] for stage in order.stages]
            elements = sum(between(floors.weights, stage) for stage in stages)
            busy: dict[str, float] = {}
            awaited = 0.0
            for place, (axis, sums) in enumerate(gathers):
                busy[axis] = self._all_gathers(plan, floors, model, order, stages, sums, each)
                awaited += busy[axis] if place else 0.0  # what the first has given, as soon as it is wanted
            for axis, sums in often:
                busy[axis] = busy.get(axis, 0.0) + each * sum(between(sums, stage) for stage in stages)
            ended = [(axis, sum(between(sums, stage) for stage in stages)) for axis, sums in once]
            longest = max((seconds for _, seconds in ended), default=0.0)
            if not late:
                for axis, seconds in ended:
                    busy[axis] = busy.get(axis, 0.0) + seconds
            update = prices.update_seconds(elements / shards(plan, plan.shard_optimizer))
            update += sum(between(sums, stage) for sums in after for stage in stages)
            summed = (
                0.0
                if each == 1 or prices.adds_in_backward
                else (each - 1) * prices.add_seconds(int(elements / shards(plan, plan.shard_gradients)))
            )
            found.append(
                RankTraffic(
                    order.rank,
                    summed + awaited,
                    max(busy.values(), default=0.0),
                    longest if len(stages) == 1 and not late else 0.0,
                    update + (longest if late else 0.0),
                )
            )
        return found

    def sums(self, shape: PlanShape, candidate: Candidate, floors: LayerFloors, on: Collective) -> list[float]:
        """Seconds of a collective on each layer's weight, as sums up to each layer."""
        mesh = candidate.plan.mesh
        key = id(floors.weights), on, mesh
        if key not in self._known:
            model, prices, group = (
                blocks_of(self.problem, shape).layers,
                self._layers.prices(candidate),
                mesh.group(0, on.axis),
            )
            seconds: dict[int, float] = {}
            for layer in set(floors.like):
                bytes = on.bytes * between(floors.weights, range(layer, layer + 1))
                apart = not bytes or on.axis in model.cut_axes(layer)  # experts are not on all of the axis's ranks
                seconds[layer] = 0.0 if apart else prices.collective_time(on.kind, bytes, group)
            self._known[key] = [0.0, *accumulate(seconds[layer] for layer in floors.like)]
        return self._known[key]

    def _all_gathers(
        self,
        plan: Plan,
        floors: LayerFloors,
        model: ModelLayers,
        order: RankOrder,
        stages: Sequence[range],
        sums: list[float],
        each: int,
    ) -> float:
        """Seconds of all gathers of a rank's weights over an axis."""
        seconds = 0.0
        for stage, visits in zip(stages, order.visits, strict=True):
            all = between(sums, stage)
            if plan.reshard_after == "step":
                seconds += all
            elif plan.reshard_after == "stage":
                seconds += visits.visits * all
            else:
                seconds += _for_each_use(all, *_ends(floors, model, stage, sums), visits, each)
        return seconds


def _for_each_use(all: float, first: float, last: float, visits: StageVisits, each: int) -> float:
    """Seconds of a stage's gathers, but for those of a block whose next use follows at once."""
    again = visits.repeated * all if first >= all else 0.0  # a stage of one block
    found = visits.passes * all - visits.forth * last - visits.back * first - again
    return max(found, each * (2 * all - first - last))


def _ends(floors: LayerFloors, model: ModelLayers, stage: range, sums: list[float]) -> tuple[float, float]:
    """Seconds of a stage's first and last block of those that have weights."""
    weighty = [layer for layer in stage if floors.weights[layer + 1] > floors.weights[layer]]
    if not weighty:
        return 0.0, 0.0
    first, last = (model.gathered_with(weighty[place]) for place in (0, -1))
    blocks = [(layer, model.gathered_with(layer)) for layer in weighty]
    return (
        sum(between(sums, range(layer, layer + 1)) for layer, block in blocks if block == first),
        sum(between(sums, range(layer, layer + 1)) for layer, block in blocks if block == last),
    )


def _among_several(plan: Plan, axes: Sequence[str]) -> list[str]:
    sizes = plan.mesh.sizes()
    return [axis for axis in dict.fromkeys(axes) if sizes[axis] > 1]


def gathered(candidate: Candidate) -> Iterator[Collective]:
    """The gathers of a weight for its use, one after the other."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    share = 1 / shards(plan, plan.shard_parameters)
    if isinstance(plan.order, Steps):  # which may say itself what is gathered when
        return
    for axis in _among_several(plan, plan.shard_parameters[::-1]):
        share *= sizes[axis]
        yield Collective(OpKind.ALL_GATHER, axis, share * candidate.precision.bytes(Kind.WEIGHT))


def gathered_after(candidate: Candidate) -> Iterator[Collective]:
    """The gathers of a weight after the optimizer's step."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    share = 1 / shards(plan, plan.shard_optimizer)
    for axis in _among_several(plan, plan.shard_optimizer[::-1]):
        if axis not in plan.shard_parameters:
            share *= sizes[axis]
            yield Collective(OpKind.ALL_GATHER, axis, share * candidate.precision.bytes(Kind.WEIGHT))


def reduced(candidate: Candidate, *, often: bool) -> Iterator[Collective]:
    """The reductions of a gradient, one after the other: of those at each microbatch, or of those once a step."""
    plan, sizes = candidate.plan, candidate.plan.mesh.sizes()
    axes = _among_several(plan, (*plan.shard_optimizer, *CUT_AXES))
    every = plan.axes_of_every_microbatch
    whole = [axis in every and axis not in plan.shard_gradients for axis in axes]
    scattered = axes[: whole.index(True) if True in whole else len(axes)]
    bytes = float(candidate.precision.bytes(Kind.GRAD_WEIGHT))
    for axis in sorted(axes, key=lambda axis: axis not in every):
        scatters = axis in scattered and axis in plan.shard_optimizer
        if (axis in every) == often:
            yield Collective(OpKind.REDUCE_SCATTER if scatters else OpKind.ALL_REDUCE, axis, bytes)
        bytes /= sizes[axis] if scatters else 1
