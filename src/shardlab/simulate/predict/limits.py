"""Limits of a framework that a plan breaks.

`broken_limit` compares a plan with the capabilities of its recipe's framework. `simulate` refuses a plan that breaks a
limit, unless a flag asks for a prediction anyway, and the planner proposes no such plan.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from shardlab.common.errors import UserError
from shardlab.common.text import counted
from shardlab.language.precision import WIDE
from shardlab.language.recompute_names import modules_of
from shardlab.models import Blocks
from shardlab.simulate.predict.capabilities import CanRun
from shardlab.simulate.predict.recipe import Recipe
from shardlab.simulate.predict.stages import modules_of_stages
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import DATA_AXES, Plan

AXIS_NAMES = {
    "pp": "pipeline parallelism",
    "tp": "tensor parallelism",
    "cp": "context parallelism",
    "ep": "expert parallelism",
}
"""Axes of a mesh as text."""

SHARED = ("nothing", "the optimizer's state alone", "gradients and the optimizer's state", "everything")
"""Model state that data-parallel ranks shard, as text, by the stage of ZeRO."""

BLOCKS_RECOMPUTED = ("first", "uniform", "every", "blocks")
"""Words of `CanRun.recompute` for recomputation of some blocks, or of several blocks together."""


def broken_limit(step: Workload) -> str:
    """Return why the recipe's framework cannot run a plan, as a sentence ("": it can, or there is no plan)."""
    plan, name, can = step.plan, step.recipe.name, step.recipe.can_run
    if not isinstance(plan, Plan):
        return ""
    microbatches = max(1, step.microbatches // plan.data_ranks)
    limits = (
        *_axes(plan, name, can),
        *_sharding(plan, name, can),
        *_pipeline(plan, name, can, microbatches, step.model),
        *_stages(plan, step.recipe, step.model),
        *_activations(plan, name, can, step),
    )
    return next((limit for limit in limits if limit), "")


def _axes(plan: Plan, name: str, can: CanRun) -> Iterator[str]:
    for axis, words in AXIS_NAMES.items():
        if can.lacks(axis) and (size := getattr(plan.mesh, axis)) > 1:
            yield f"{name} has no {words}, and this plan has {axis} {size}; give --{axis} 1"
    if plan.mesh.tp > 1 and can.sequence_parallel and plan.sequence_parallel != (can.sequence_parallel == "always"):
        always, flag = can.sequence_parallel == "always", "sequence-parallel"
        cuts = "cut sequences" if always else "do not cut sequences"
        yield f"{name}'s tensor-parallel ranks {cuts}; give --{flag if always else f'no-{flag}'}"
    if plan.mesh.cp > 1 and can.context and (context := context_kind(plan)) not in can.context:
        words = " or ".join(kind for kind in can.context if "+" not in kind)
        yield f"{name} has no context parallelism by {context}; give --context {words}"


def _sharding(plan: Plan, name: str, can: CanRun) -> Iterator[str]:
    pp, stage = plan.mesh.pp, plan.zero_stage
    replicas = _replicas_of_shards(plan)
    if can.lacks("dp_replicate") and replicas:
        yield (
            f"{name} has no replicas of ranks that share something, and this plan has {replicas} of them; let all "
            "data-parallel ranks share it, or none"
        )
    shares = _data_ranks(plan) > 1
    if shares and stage not in (stages := can.stages_of_zero(pp)):
        with_pipeline = " with a pipeline" if stage in can.stages_of_zero(1) else ""
        stage_numbers = " and ".join(map(str, stages))
        words = " or ".join(SHARED[number] for number in stages)
        yield (
            f"{name} has ZeRO {stage_numbers}{with_pipeline}, and this plan is ZeRO-{stage}; "
            f"let data-parallel ranks share {words}"
        )
    if replicas and stage not in can.replicated_zero_stages:
        yield (
            f"{name} has no replicas of the shards of ZeRO-{stage}, and this plan has {replicas} of them; let all "
            "data-parallel ranks share it"
        )
    shard_axes, optimizer_axes = plan.shard_parameters or plan.shard_gradients, set(plan.shard_optimizer)
    with_gradients = can.state_over_replicas == "with gradients" and optimizer_axes == set(plan.shard_gradients)
    if shard_axes and can.state_over_replicas and optimizer_axes != set(shard_axes) and not with_gradients:
        axes = " ".join(shard_axes)
        or_more = "" if can.state_over_replicas == "never" else ", or --shard-gradients the same"
        yield (
            f"{name} cuts the optimizer's state over the axes of what it belongs to; give --shard-optimizer "
            f"{axes}{or_more}"
        )
    if plan.mesh.cp > 1 and plan.shard_optimizer and can.shards_over_cp:
        always = can.shards_over_cp == "always"
        if ("cp" in plan.shard_optimizer) != always:
            verb = "cuts" if always else "does not cut"
            yield (
                f"{name} {verb} over cp what data-parallel ranks share; {'name' if always else 'leave out'} cp in "
                "--shard-optimizer and the like"
            )
    if can.gradients_with_pp == "whole" and pp > 1 and stage == 3 and plan.shard_gradients:
        yield f"{name} keeps a pipeline's gradients whole, and reduces them once a step; leave out --shard-gradients"
    reshard_modes = can.reshards(pp)
    if stage == 3 and reshard_modes and plan.reshard_after not in reshard_modes:
        yield (
            f"{name} does not free gathered weights after each {plan.reshard_after}; "
            f"give --reshard-after {reshard_modes[0]}"
        )


def _pipeline(plan: Plan, name: str, can: CanRun, microbatches: int, model: Blocks) -> Iterator[str]:
    pp, schedule = plan.mesh.pp, plan.schedule_name
    if pp == 1:
        return
    if can.schedules and schedule not in can.schedules:
        yield f"{name} has no pipeline schedule {schedule}; give {' or '.join(can.schedules)}"
    if pp < (min_ranks := can.pipeline_ranks.get(schedule, 1)):
        yield (
            f"{name}'s {schedule} needs at least {min_ranks} pipeline ranks; give --pp {min_ranks}, or another schedule"
        )
    for condition in can.microbatches.get(schedule, ()):
        number, multiple = _condition(condition, plan, microbatches, model)
        if (microbatches % number if multiple else microbatches < number) != 0:
            text = f"a multiple of {number}" if multiple else f"at least {number}"
            yield (
                f"{name}'s {schedule} needs {condition} microbatches; with pp {pp} give {text} to each data-parallel "
                f"rank, not {microbatches}"
            )


def _condition(text: str, plan: Plan, microbatches: int, model: Blocks) -> tuple[int, bool]:
    """Return the number in a condition on microbatches, and whether it reads "multiple of" rather than "at least"."""
    pp = plan.mesh.pp
    stages = pp * plan.stages_on_rank(model.layers) if text.endswith("stages") else 0
    conditions = {
        "at least pp - 1": (pp - 1, False),
        "at least pp": (pp, False),
        "at least stages": (stages, False),
        "multiple of pp": (pp, True),
        "multiple of rounds": (max(1, microbatches // pp), True),
    }
    if text not in conditions:
        raise UserError(f"a recipe's can_run.microbatches has {text!r}; give one of {', '.join(conditions)}")
    return conditions[text]


def _stages(plan: Plan, recipe: Recipe, model: Blocks) -> Iterator[str]:
    pp, can = plan.mesh.pp, recipe.can_run
    if pp == 1:
        return
    if recipe.defaults.stages == "cost" and modules_of_stages(model, pp) is None:
        yield (
            f"{recipe.name} deals modules to stages by cost, and leaves nothing for the last of {pp}; give fewer "
            "pipeline ranks"
        )
    stages, blocks, counts = pp * plan.stages_on_rank(model.layers), model.layers, plan.layers_per_stage
    head = bool(counts) and sum(counts) != blocks  # the head counts as one more layer, of the last stage
    even = len({*counts[:-1], counts[-1] - head}) == 1 if counts else blocks % stages == 0
    if can.stages == "even" and not even:
        yield (
            f"{recipe.name} has stages of as many blocks each, and {counted(blocks, 'block')} do not divide among "
            f"{stages} stages; give a number of stages that divides {blocks}"
        )


def _activations(plan: Plan, name: str, can: CanRun, step: Workload) -> Iterator[str]:
    if not can.recomputes(kind := recompute_kind(plan)):
        modes = ", ".join(f"{mode}-N" if mode in BLOCKS_RECOMPUTED[:3] else mode for mode in can.recompute)
        recomputation = "blocks by number" if kind == "blocks" else f"recomputation {plan.recompute}"
        yield f"{name} has no {recomputation}; give --recompute {modes}"
    if "mla_up_proj" in modules_of(kind) and getattr(step.model, "kv_rank", None) is None:
        yield f"{name} recomputes mla_up_proj of latent attention alone, which this model lacks; leave it out"
    computed = step.precision.name.removesuffix(WIDE)
    if can.precisions and computed not in can.precisions:
        yield f"{name} does not train in {computed}; give --precision {' or '.join(can.precisions)}"
    offloaded = {
        word for setting in re.findall(r"offload=([^,]+)", step.pass_names) for word in re.findall(r"(\w+):", setting)
    }
    if can.offload and (wrong := sorted(offloaded.difference(can.offload))):
        yield f"{name} does not offload {wrong[0]}; give {' or '.join(can.offload)}, or leave out --offload"


def recompute_kind(plan: Plan) -> str:
    """Return the word of `CanRun.recompute` for a plan's recomputation: "blocks" if the plan lists blocks by number."""
    if isinstance(plan.recompute, tuple):
        return "blocks" if plan.recompute else "none"
    return plan.counted_recompute[0] if plan.counted_recompute else plan.recompute


def context_kind(plan: Plan) -> str:
    """Return the word of `CanRun.context` for a plan's context parallelism."""
    return "ulysses+ring" if 1 < plan.ulysses < plan.mesh.cp else "ulysses" if plan.ulysses > 1 else plan.context


def _data_ranks(plan: Plan) -> int:
    """Return the product of the sizes of all data-parallel axes and all other axes that shard the optimizer state."""
    sizes = plan.mesh.sizes()
    return math.prod(sizes[axis] for axis in {*DATA_AXES, *plan.shard_optimizer})


def _replicas_of_shards(plan: Plan) -> int:
    """Return how many data-parallel ranks keep the same slice of the optimizer state (0: one, or it is not sliced)."""
    sizes = plan.mesh.sizes()
    replicas = math.prod(sizes[axis] for axis in DATA_AXES if axis not in plan.shard_optimizer)
    return replicas if plan.shard_optimizer and replicas > 1 else 0
