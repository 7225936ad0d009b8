"""When the ranks of a pipeline have done their passes at the earliest, however weights are gathered."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array
from shardlab.planner.gathering_passes import gathering_passes
from shardlab.planner.layer_floors import LayerFloors
from shardlab.planner.pass_counts import PassCounts, hands_back_last
from shardlab.planner.stage_ends import StageEnds, StageSums
from shardlab.planner.way_traffic import RESHARDS, StageTraffic
from shardlab.strategies.plan import Plan


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
    floors: LayerFloors,
    stages: StageEnds,
    counts: PassCounts,
    more: int,
    traffic: StageTraffic,
    messages: Array,
) -> EarliestPasses:
    """Tell when the ranks of a pipeline have done their passes at the earliest, however weights are gathered.

    Args:
        plan: the pipeline.
        floors: of its layers.
        stages: where they are.
        counts: of passes.
        more: microbatches that are not counted.
        traffic: what is gathered.
        messages: seconds of a message after a forward pass (0) or a backward pass (1) on a stage: (2, stages).
    """
    plain = np.array([stages.all(sums) for sums in floors.arrays[:4]])
    again, opening, begins = gathering_passes(floors, stages, plain, traffic.ahead, traffic.awaited)
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
    handed_back = floors.arrays.backward[stages.start] + np.cumsum(messages[1])
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
