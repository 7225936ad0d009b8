"""Strategies: the training step of one rank, as a program.

Nine short programs come first; each adds one idea. Read them in this order: `single`, `grad_accum`, `ddp`, `wsdp`,
`fsdp`, `column_parallel`, `tensor_parallel`, `expert_parallel`, `pipeline`. All other strategies are plans, that is,
settings of one general program: the presets below show which settings make ZeRO, HSDP, every pipeline schedule, context
parallelism and 3D parallelism. The general program is in `plan`, and the pipeline schedules are in `schedules`.
`registry` has the table that `shardlab strategies` lists, and `load` finds a strategy by the name that a user types.

This module imports every module of the folder, because a program declares itself with `built_in`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from shardlab.common.errors import unknown_name
from shardlab.language import Mesh, UserError
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import DECLARED, Preset, StrategyEntry, preset
from shardlab.strategies.schedules import SCHEDULES, Schedule

ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
SHARD = ("dp_shard",)
ALL_DATA = ("dp_shard", "dp_replicate")


@preset("the batch and optimizer state", "W + G + O/n", f"{ZERO}, stage 1", sends="2 * (n - 1) / n * W")
def zero_1(ranks: int) -> Plan:
    """Shard the optimizer state."""
    return Plan(Mesh(dp_shard=ranks), shard_optimizer=SHARD)


@preset(
    "the batch, gradients and optimizer state", "W + (G + O)/n", f"{ZERO}, stage 2", sends="(k + 1) * (n - 1) / n * W"
)
def zero_2(ranks: int) -> Plan:
    """Shard the gradients and the optimizer state."""
    return Plan(Mesh(dp_shard=ranks), shard_gradients=SHARD, shard_optimizer=SHARD)


@preset(
    "as fsdp, with microbatches",
    "(W + G + O)/n",
    f"{ZERO}, stage 3",
    sends="(3 * k - (2 * k - 1) / L) * (n - 1) / n * W",
)
def zero_3(ranks: int) -> Plan:
    """Shard weights, gradients and optimizer state."""
    return _fully_sharded(Mesh(dp_shard=ranks))


@preset(
    "the batch; all else within each of two replicas",
    "(W + G + O)/s",
    "Zhao et al. 2023, arXiv 2304.11277",
    sends="((3 * k - (2 * k - 1) / L) * (s - 1) / s + 2 * (r - 1) / r / s) * W",
)
def hsdp(ranks: int) -> Plan:
    """Shard everything within each half of the ranks. The halves are replicas; they reduce gradients once a step."""
    return _fully_sharded(_two_replicas(ranks))


@preset(
    "as hsdp; optimizer state over all ranks",
    "(W + G)/s + O/n",
    "Levanter, issue 325",
    sends="((3 * k - (2 * k - 1) / L) * (s - 1) / s + 2 * (r - 1) / r / s) * W",
)
def partially_sharded(ranks: int) -> Plan:
    """Shard weights and gradients as `hsdp` does, and the optimizer state over all ranks."""
    return Plan(_two_replicas(ranks), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=ALL_DATA)


def pipeline_preset(schedule: str) -> Preset:
    """Return a preset in which all ranks form one pipeline with this schedule."""
    return lambda ranks: Plan(Mesh(pp=ranks), schedule)


def messages_of(schedule: Schedule) -> str:
    """Return the formula for the elements of activations and gradients sent in a step, on the rank that sends most.

    If the stages form a loop, the last rank also sends activations to the first. If they form a V, the two stages at
    the turn are on one rank and exchange no messages.
    """
    if schedule.stages_per_rank is None:
        return "2 * v * m * A"
    return "min(2, p - 1) * m * A" if schedule.stages_per_rank == 1 else "min(2, p - 1) * v * m * A"


for schedule in SCHEDULES.values():
    preset(
        f"the layers{'' if schedule.stages_per_rank == 1 else ', in loops'}; the batch over time",
        "(W + G + O)/p",
        schedule.source,
        sends=messages_of(schedule),
        name=schedule.name,
    )(pipeline_preset(schedule.name))


@preset(
    "the layers, and all that fsdp splits",
    "W/p + (W + G + O)/n",
    "LLM Training Puzzles, puzzle 7",
    sends="(1 + k) * (s - 1) / s * W / p + min(2, p - 1) * k * A",
)
def pipeline_fsdp(ranks: int) -> Plan:
    """Run a GPipe pipeline of fully sharded stages. The mesh is as square as the number of ranks allows."""
    return _fully_sharded(_square(ranks), "gpipe")


@preset(
    "the layers, in loops, and all that fsdp splits",
    "W/(p*v) + (W + G + O)/n",
    "Lamy-Poirier 2022, arXiv 2211.05953",
    sends="((2 * v - 1) / v + k) * (s - 1) / s * W / p + (2 * v - 1) * k * A",
)
def breadth_first_fsdp(ranks: int) -> Plan:
    """Run a breadth-first pipeline of fully sharded stages. In each direction, a stage gathers its weights once."""
    return _fully_sharded(_square(ranks), "breadth-first")


@preset(
    "the sequences",
    "W + G + O",
    "Liu et al. 2023, arXiv 2310.01889",
    sends="2 * (3 * c - 2) / c * L * m * A + 2 * (c - 1) / c * W",
)
def context_parallel(ranks: int) -> Plan:
    """Split every sequence over the ranks. Keys and values travel around a ring."""
    return Plan(Mesh(cp=ranks))


@preset(
    "the batch, the layers and their matrices",
    "(W + G + O)/(p*t)",
    "Narayanan et al. 2021, arXiv 2104.04473",
    sends="((4 * L / p + 1) * 2 * (t - 1) / t + 2) * k * A + 2 * (d - 1) / d * W / (p * t)",
    ranks=8,
    name="3d",
)
def three_dimensional(ranks: int) -> Plan:
    """Combine a pipeline of two stages, tensor parallelism over two ranks, and data parallelism over the rest."""
    if ranks % 4:
        raise UserError(f"{ranks} ranks do not divide by pp 2 x tp 2; give a multiple of 4, or a mesh by --pp and --tp")
    return Plan(Mesh(pp=2, dp_shard=ranks // 4, tp=2))


@preset(
    "as 3d, and sequences between the matrices",
    "(W + G + O)/(p*t)",
    "Korthikanti et al. 2022, arXiv 2205.05198",
    sends="((4 * L / p + 1) * 2 * (t - 1) / t + 2 / t) * k * A + 2 * (d - 1) / d * W / (p * t)",
    ranks=8,
    name="4d",
)
def four_dimensional(ranks: int) -> Plan:
    """Add sequence parallelism to `3d`: activations between the matrices are split over the tensor-parallel ranks."""
    return replace(three_dimensional(ranks), sequence_parallel=True)


def find(name: str) -> StrategyEntry:
    """Return the built-in strategy with this name; `_` and `-` are the same.

    Raises:
        UserError: if there is none. The message suggests the nearest name.
    """
    if (spelled := name.replace("_", "-")) in STRATEGIES:
        return STRATEGIES[spelled]
    raise unknown_name("strategy", name, STRATEGIES, " and path/to/file.py:function")


for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

STRATEGIES = {entry.name: entry for entry in sorted(DECLARED, key=lambda entry: entry.order)}
"""Every built-in strategy by name."""

__all__ = ["STRATEGIES", "Plan", "StrategyEntry", "find"]


def _fully_sharded(mesh: Mesh, schedule: str = "1f1b") -> Plan:
    return Plan(
        mesh,
        schedule,
        shard_parameters=SHARD,
        shard_gradients=SHARD,
        shard_optimizer=SHARD,
        reshard_after="stage" if mesh.pp > 1 else "layer",
    )


def _two_replicas(ranks: int) -> Mesh:
    if ranks % 2:
        raise UserError(
            f"{ranks} ranks do not make two replicas; give an even number, or a mesh by --dp-replicate and --dp-shard"
        )
    return Mesh(dp_replicate=2, dp_shard=ranks // 2)


def _square(ranks: int) -> Mesh:
    """Return the mesh whose number of stages is the largest divisor of the ranks up to their square root."""
    stages = max(n for n in range(1, math.isqrt(max(ranks, 1)) + 1) if ranks % n == 0)
    return Mesh(pp=stages, dp_shard=ranks // stages)
