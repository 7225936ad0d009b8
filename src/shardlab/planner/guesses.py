"""Guesses of the step time and memory of lines, each in about a millisecond.

The search guesses before it simulates. A guess is not a bound. Its time is the sum of the passes of all layers, the
bubble of the pipeline, and the communication of data-parallel ranks; its memory follows from closed formulas for the
fullest device. The search learns how forecasts differ from guesses, for each kind of plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from shardlab.common.errors import UserError
from shardlab.language import Kind, OpKind
from shardlab.planner.lines import own_recompute, with_share
from shardlab.planner.pass_costs import LayerCosts, PassCosts
from shardlab.planner.problem import SHARES, Candidate
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.predict.forecast import microbatches_to_replay
from shardlab.simulate.predict.memory import device_memory, model_state
from shardlab.simulate.timeline.memory import Category
from shardlab.strategies.plan.plan import Plan

SPLIT_BUBBLE = 0.3
"""Share of the bubble that remains if backward passes are split, as in ZB-H1."""

EXPOSED_MESSAGES = 0.2
"""Share of the time of a pipeline's messages that is not hidden behind passes."""


class Guess(NamedTuple):
    """Guess of the step time and memory of a line, without recomputation and with all blocks recomputed.

    A line is a set of plans that differ only in how many blocks are recomputed (`shardlab.planner.lines`).

    Attributes:
        seconds, bytes: figures of the plan that recomputes no block.
        full_seconds, full_bytes: figures of the plan that recomputes every block.
        passes: approximate number of passes that a forecast replays. A pass that is replayed op by op counts as eight.
    """

    seconds: float
    bytes: float
    full_seconds: float
    full_bytes: float
    passes: float


def guess_line(costs: PassCosts, line: Candidate) -> Guess | None:
    """Guess seconds and bytes of a line (None: its stages or its recomputation are not possible).

    Args:
        costs: costs of the problem's layers.
        line: the line.
    """
    problem = costs.problem
    default = own_recompute(line.plan)
    try:
        none = costs.of(line, default)
        fixed = problem.limits.fixed.get("recompute", default)
        if fixed != default:
            none = full = costs.of(line, "full") if fixed == "full" else none
        else:
            full = none if default != "none" or with_share(problem, line, "full") is None else costs.of(line, "full")
        sums = [part(costs, line, layers) for layers in (none, full) for part in (_seconds, _bytes)]
        return Guess(*sums, passes=_passes_to_replay(costs, line))
    except UserError:
        return None


def _microbatches(costs: PassCosts, line: Candidate) -> int:
    """Return the number of microbatches of each data-parallel rank in a step."""
    return costs.problem.sequences // (line.plan.data_ranks * line.micro_batch_size)


def _seconds(costs: PassCosts, line: Candidate, layers: LayerCosts) -> float:
    """Return the seconds of a step: passes on the last pipeline rank, the bubble, and exposed communication."""
    plan, microbatches, pp = line.plan, _microbatches(costs, line), line.plan.mesh.pp
    head = 0.0 if costs.problem.recipe.defaults.stages == "cost" else layers.head
    bubble = SPLIT_BUBBLE if plan.schedule_name.startswith(("zb", "v-", "dual")) else 1.0
    slots = microbatches + bubble * (pp - 1) / (plan.stages_per_rank or 1)
    passes = slots * ((layers.seconds - head) / pp + head)
    exposed, concurrent = _data_parallel_seconds(costs, line, layers)
    return max(passes, concurrent) + exposed + EXPOSED_MESSAGES * _message_seconds(costs, line)


def _message_seconds(costs: PassCosts, line: Candidate) -> float:
    """Return the seconds of all messages between one pipeline rank and the next in a step."""
    plan, model = line.plan, costs.problem.model
    if plan.mesh.pp == 1:
        return 0.0
    sliced = plan.mesh.cp * (plan.mesh.tp if plan.sequence_parallel else 1)
    bytes = line.micro_batch_size * model.seq_len * model.hidden_size * line.precision.bytes(Kind.ACTIVATION) / sliced
    source, target = plan.mesh.group(0, "pp").ranks[:2]
    _, seconds = costs.cluster_prices(line).message_times(Kind.ACTIVATION, bytes, source, target)
    return 2 * _microbatches(costs, line) * (plan.stages_per_rank or 1) * seconds


def _data_parallel_seconds(costs: PassCosts, line: Candidate, layers: LayerCosts) -> tuple[float, float]:
    """Return the seconds of data-parallel communication: exposed, and concurrent with passes, each summed over a step.

    Parameters that are sharded over several axes are gathered over one axis after the other, the last axis first. The
    first gather is prefetched, and the others are awaited (`ParameterGatherer`). If attention gathers keys and values
    over the axis of the prefetched gather, attention waits for the prefetched gather, which was issued before.
    """
    plan, precision, microbatches = line.plan, line.precision, _microbatches(costs, line)
    prices, mesh = costs.cluster_prices(line), line.plan.mesh
    weights = layers.weights / mesh.pp

    def gathers(axes: Iterable[str]) -> list[float]:
        """Return the seconds of the gathers of all weights over each axis, the last axis first."""
        bytes, times = weights * precision.bytes(Kind.WEIGHT), list[float]()
        for axis in axes:
            times.insert(0, prices.collective_time(OpKind.ALL_GATHER, bytes, mesh.group(0, axis)))
            bytes /= getattr(mesh, axis)
        return times

    def reductions() -> float:
        """Return the seconds to reduce all gradients over each axis in turn.

        If the optimizer state is sharded over an axis, the next axis reduces only the slice that this one leaves.
        """
        bytes, seconds = weights * precision.bytes(Kind.GRAD_WEIGHT), 0.0
        for axis in ("dp_shard", "dp_replicate", "cp"):
            sharded = axis in plan.shard_optimizer
            verb = OpKind.REDUCE_SCATTER if sharded else OpKind.ALL_REDUCE
            seconds += prices.collective_time(verb, bytes, mesh.group(0, axis))
            bytes /= getattr(mesh, axis) if sharded else 1
        return seconds

    try:
        reduced = (microbatches if plan.shard_gradients else 1) * reductions()
        if not plan.shard_parameters:
            return sum(gathers(plan.shard_optimizer)), reduced
        prefetched, *awaited = gathers(plan.shard_parameters)
    except UserError:  # the profile lacks a collective
        return 0.0, 0.0
    resident = mesh.pp * (plan.stages_per_rank or 1) / costs.problem.model.layers  # one block of a stage stays gathered
    uses = {
        "layer": max(1.0, 2 * microbatches * (1 - resident)),
        "forward": microbatches + 1,
        "stage": microbatches,
        "step": 1,
    }[plan.reshard_after]
    queued = prefetched if plan.shard_parameters[-1] == "cp" and plan.context == "all_gather" else 0.0
    return uses * (sum(awaited) + queued), uses * (prefetched - queued) + reduced


def _bytes(costs: PassCosts, line: Candidate, layers: LayerCosts) -> float:
    """Return the approximate bytes of the fullest device, as `device_memory` counts them."""
    problem, plan, precision, microbatches = costs.problem, line.plan, line.precision, _microbatches(costs, line)
    pp, stages, mesh, schedule = plan.mesh.pp, plan.stages_per_rank or 1, plan.mesh, plan.schedule_name
    flights = {
        "gpipe": microbatches,
        "breadth-first": microbatches,
        "zb-h2": 2 * pp - 1,
        "interleaved-1f1b": pp + (pp - 1) / stages,
        "v-half": (pp + 2) // 2,
        "v-min": (pp + 4) // 3,
        "dualpipe-v": pp + 1,
    }
    weights = layers.weights / pp
    block = layers.weights / problem.model.layers
    model = model_state(plan, weights, precision, problem.recipe, problem.optimizer)
    gathered = {"layer": 2 * block, "forward": weights, "stage": weights / stages, "step": weights}[plan.reshard_after]
    state = sum(model) + layers.block + (gathered * precision.bytes(Kind.WEIGHT) if plan.shard_parameters else 0.0)
    state += model_state(Plan(), block, precision, problem.recipe).gradients if plan.shard_gradients else 0.0
    by_category = {
        Category.PARAMETERS.value: int(model.parameters),
        Category.OPTIMIZER.value: int(model.optimizer),
        Category.GRADIENTS.value: int(model.gradients),
    }

    def peak(stage: int) -> Peak:
        last = stage == pp - 1
        flight = min(flights.get(schedule, 1 if last else pp), microbatches)
        # zb schedules compute gradients of weights later
        losses = min(pp, microbatches) if schedule.startswith("zb") else 1
        bytes = state + layers.saved_bytes / pp * flight + last * losses * layers.logits
        return Peak(mesh.group(0, "pp").ranks[stage], int(bytes), by_category, OpKind.BACKWARD, 0, 0)

    return device_memory(problem.workload(line), [peak(stage) for stage in sorted({0, pp - 1})]).unlimited


def share_between(none: float, full: float, share: str) -> float:
    """Return a figure for a share of recomputed blocks, interpolated between the figures for none and all of them."""
    return none + SHARES.get(share, 0.0) * (full - none)


def _passes_to_replay(costs: PassCosts, line: Candidate) -> float:
    plan, microbatches = line.plan, _microbatches(costs, line)
    ring = plan.context == "ring" and plan.mesh.cp > plan.ulysses
    replayed = microbatches if ring else min(microbatches, sum(microbatches_to_replay(plan, microbatches)))
    return replayed * plan.mesh.pp * (plan.stages_per_rank or 1) * (8 if ring else 1)
