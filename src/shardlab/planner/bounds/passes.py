"""Earliest times of the passes of a pipeline, with messages, gathers of weights and sums of gradients.

`earliest_passes` needs only the number of passes of each stage. `TimedPasses` follows the order of the schedule: a pass
waits for its inputs, for the message that brings them, and for weights that are gathered meanwhile. It times as many
microbatches as a forecast simulates, and adds the work of the rest.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from shardlab.planner.bounds.communication import (
    RESHARDS,
    Collective,
    LastGradients,
    StageTraffic,
    StepTraffic,
    gathered,
    gathering_passes,
    gathers_of_ranks,
    reduced,
    while_gathering,
)
from shardlab.planner.bounds.layers import Array, LayerBounds, ShapeLayers
from shardlab.planner.bounds.pipelines import (
    PassCounts,
    Pipelines,
    PlacedEnds,
    StageEnds,
    StageMessages,
    StageSums,
    hands_back_last,
)
from shardlab.planner.bounds.schedule_order import LaidOrder, PassTimes
from shardlab.planner.problem import Candidate, PlanShape, blocks_of
from shardlab.strategies.plan.plan import Plan


class EarliestPasses(NamedTuple):
    """When passes end at the earliest, if weights are gathered so: (reshards, gatherings, ranks) each.

    Attributes:
        done: the last one of each rank, and what other ranks do after it.
        begun: the first backward pass; the same for all ranks.
        gathers: seconds of each axis's gathers: (axes, reshards, gatherings, ranks).
    """

    done: Array
    begun: Array
    gathers: Array


def earliest_passes(
    plan: Plan,
    bounds: LayerBounds,
    stages: StageEnds,
    counts: PassCounts,
    more: int,
    traffic: StageTraffic,
    messages: Array,
) -> EarliestPasses:
    """Tell when the ranks of a pipeline have done their passes at the earliest, however weights are gathered.

    Args:
        plan: the pipeline.
        lower bounds: of its layers.
        stages: where they are.
        counts: of passes.
        more: microbatches that are not counted.
        traffic: what is gathered.
        messages: seconds of a message after a forward pass (0) or a backward pass (1) on a stage: (2, stages).
    """
    plain = np.array([stages.all(sums) for sums in bounds.arrays[:4]])
    again, opening, begins = gathering_passes(bounds, stages, plain, traffic.ahead, traffic.awaited)
    placed = stages.placed
    # The first forward pass on a stage gathers all of its weights; no other one on it is earlier
    first = opening[:, 0].copy()
    first[:, counts.begins] = begins[:, counts.begins]
    entered = np.cumsum(first + messages[0], axis=1)
    before = entered - first - messages[0]
    all = np.empty((len(RESHARDS), *opening.shape))
    for place, reshard in enumerate(RESHARDS):
        base, passes = again if reshard == "layer" else plain, all[place]
        passes[:] = counts.all * base + more * _each(base)
        if reshard != "step":
            passes += counts.visits * (opening - base)
        else:
            passes[:, 0] += opening[:, 0] - plain[0]
        passes[:, 0] += first - opening[:, 0]
    begun = entered[:, -1][:, None]
    handed_back = bounds.arrays.backward[stages.start] + np.cumsum(messages[1])
    after = handed_back[stages.lowest] if hands_back_last(plan) else 0.0
    handed = np.minimum(plain[1], plain[2]) + messages[1]
    later = handed.sum() - np.cumsum(handed)  # backward passes on the stages after each one
    left = (counts.all[0] - counts.ahead) * plain[0]  # forward passes after a rank's first backward pass
    done = np.maximum(
        before[:, counts.begins] + all.sum(axis=2) @ placed,
        begun + later[counts.turns] + (left + all[:, :, 1:].sum(axis=2)) @ placed,
    )
    gathers = _gathers(counts, more, traffic.gathers, placed)
    return EarliestPasses(done + after, np.broadcast_to(begun, done.shape), gathers)


def _each(passes: Array) -> Array:
    """Seconds of a microbatch's passes, of the kinds of which there is one at least: (..., kinds, stages)."""
    found = np.zeros_like(passes)
    found[..., 0, :] = passes[..., 0, :]
    found[..., 1, :] = np.minimum(passes[..., 1, :], passes[..., 2, :] + passes[..., 3, :])
    return found


def _gathers(counts: PassCounts, more: int, gathers: StageSums, placed: Array) -> Array:
    """Seconds of each rank's gathers over each axis, but for blocks that may be there already:
    (axes, reshards, gatherings, ranks)."""
    visits, again = counts.visits.sum(axis=0), counts.all - counts.visits
    visited = visits * gathers.all
    kept = visited + (again[0] + more) * gathers.but_head + (again[1] + again[2] + more) * gathers.but_tail
    of = {"layer": kept, "stage": visited, "step": gathers.all}
    return np.stack([of[reshard] @ placed for reshard in RESHARDS], axis=1)


class Timed(NamedTuple):
    """A pipeline's passes, timed with so many microbatches as a forecast replays.

    Attributes:
        order: what was timed.
        seconds: of each kind of pass on each stage: (kinds, stages).
        adds: to add a stage's gradients to older ones: (stages,).
        messages: see `LaidOrder.times`.
        more: microbatches that are not timed.
        times: of all microbatches, whose gradients are added nowhere.
    """

    order: LaidOrder
    seconds: Array
    adds: Array
    messages: Array
    more: int
    times: PassTimes


class Followed(NamedTuple):
    """A candidate's passes, timed.

    Attributes:
        times: of all microbatches.
        gathers: seconds of gathers over each axis, at least: (ranks,) each.
        gradients: when the last ones are made.
    """

    times: PassTimes
    gathers: dict[str, Array]
    gradients: LastGradients


class Passes(NamedTuple):
    """What the time of a pipeline's passes depends on.

    Attributes:
        timed: which pipeline.
        adds: whether gradients are added to older ones.
        gathers: of weights.
        shared: the mesh and when weights are let go of, if any are gathered.
    """

    timed: int
    adds: bool
    gathers: tuple[Collective, ...]
    shared: tuple[Hashable, ...]


class TimedPasses:
    """Passes of a problem's pipelines and candidates, timed."""

    def __init__(
        self,
        layers: ShapeLayers,
        pipelines: Pipelines,
        traffic: StepTraffic,
        ends: PlacedEnds,
        messages: StageMessages,
    ) -> None:
        self.problem = layers.problem
        self._layers, self._pipelines, self._traffic, self._ends = layers, pipelines, traffic, ends
        self._messages = messages
        self._orders: dict[Hashable, LaidOrder] = {}
        self._timed: dict[Hashable, Timed] = {}
        self._followed: dict[Hashable, Followed] = {}

    def followed(self, shape: PlanShape, candidate: Candidate) -> Followed:
        """A candidate's passes."""
        passes = self._passes(self.of(shape, candidate.plan), candidate)
        if passes not in self._followed:
            self.follow(shape, [candidate])
        return self._followed[passes]

    def of(self, shape: PlanShape, plan: Plan) -> Timed:
        """A pipeline's passes, whatever is gathered."""
        key = shape, plan.schedule, plan.stages_per_rank, plan.layers_per_stage, plan.recompute
        if key not in self._timed:
            bounds, stages = self._layers.bounds(shape, plan.recompute), self._ends.of(shape, plan)
            order, more = self._laid(shape, plan)
            seconds = np.array([stages.all(sums) for sums in bounds.arrays[:4]])
            messages = self._messages.of(shape, stages)
            prices = self._layers.prices(shape.candidate)
            adds = np.zeros(len(stages.rank))
            if not prices.adds_in_backward:
                weights: list[float] = stages.all(bounds.arrays.weights).tolist()
                adds = np.array([prices.add_seconds(int(elements)) for elements in weights])
            times = _extended(
                order.times(seconds[order.kind, order.stage], messages, prices.blocking_p2p), more, seconds, stages
            )
            self._timed[key] = Timed(order, seconds, adds, messages, more, times)
        return self._timed[key]

    def _laid(self, shape: PlanShape, plan: Plan) -> tuple[LaidOrder, int]:
        """The order of a pipeline's ranks, on so many microbatches that it then repeats itself; how many are left."""
        few, more = self._pipelines.timed(shape, plan)
        key = plan.mesh.pp, plan.schedule, len(self._pipelines.stages(shape, plan)), few
        if key not in self._orders:
            units = blocks_of(self.problem, shape).layers.pipeline_units
            self._orders[key] = LaidOrder(plan.steps(units, few * plan.data_ranks))
        return self._orders[key], more

    def follow(self, shape: PlanShape, candidates: Sequence[Candidate]) -> None:
        """Time the passes of candidates with one pipeline all in one go, with gathers and sums of gradients in them."""
        plan = candidates[0].plan
        timed, stages = self.of(shape, plan), self._ends.of(shape, plan)
        missing = {
            key: candidate for candidate in candidates if (key := self._passes(timed, candidate)) not in self._followed
        }
        if not missing:
            return
        order, bounds, pp = timed.order, self._layers.bounds(shape, plan.recompute), plan.mesh.pp
        last = np.minimum(np.diff(bounds.arrays.backward), np.diff(bounds.arrays.halves))[stages.last]
        asked: list[Array] = []
        works: list[Array] = []
        gathers: list[dict[str, Array]] = []
        for key, candidate in missing.items():
            seconds, work, found = timed.seconds[order.kind, order.stage], timed.seconds, dict[str, Array]()
            if key.gathers:
                sums = [self._traffic.sums(shape, candidate, bounds, on) for on in key.gathers]
                seconds, work = while_gathering(candidate.plan, order, timed.seconds, stages, bounds, sums)
                for on, of_axis in zip(key.gathers, sums, strict=True):
                    found[on.axis] = gathers_of_ranks(candidate.plan, order, timed.more, stages, of_axis)
            if key.adds:
                seconds = seconds + np.where(order.sums, timed.adds[order.stage], 0.0)
                work = work + timed.adds * np.array([[0], [1], [0], [1]])
            asked.append(seconds)
            works.append(work)
            gathers.append(found)
        blocks = self._layers.prices(candidates[0]).blocking_p2p
        all = timed.order.all_times(asked, timed.messages, blocks)
        starts = np.searchsorted(np.sort(stages.rank), np.arange(pp))
        for key, times, work, found in zip(missing, all, works, gathers, strict=True):
            times = _extended(times, timed.more, work, stages)
            turns = np.lexsort((-times.last, stages.rank))
            self._followed[key] = Followed(times, found, LastGradients(turns, (times.last + last)[turns], starts))

    def _passes(self, timed: Timed, candidate: Candidate) -> Passes:
        """What the time of a candidate's passes depends on."""
        plan, collectives = candidate.plan, tuple(gathered(candidate))
        adds = bool(timed.adds.any()) and not any(reduced(candidate, often=True))  # what is reduced is added later
        return Passes(id(timed), adds, collectives, (plan.mesh, plan.reshard_after) if collectives else ())


def _extended(times: PassTimes, more: int, seconds: Array, stages: StageEnds) -> PassTimes:
    """Passes of more microbatches: each rank has its work on them to do, before its last one."""
    if not more:
        return times
    each = seconds[0] + np.minimum(seconds[1], seconds[2] + seconds[3])
    work = more * np.bincount(stages.rank, each, len(times.done))
    return times._replace(done=times.done + work, last=times.last + work[stages.rank])
