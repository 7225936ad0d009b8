"""Built-in strategies: the short files are to be read, in the order of `shardlab strategies`; the rest are plans.

A strategy is declared by its own module, with `built_in` or `preset`; every module of this folder is imported.
"""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from pkgutil import iter_modules

from shardlab.common.errors import unknown
from shardlab.language import Mesh, UserError
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import DECLARED, Preset, StrategyEntry, preset
from shardlab.strategies.schedules import SCHEDULES

# Plans by name, for any number of ranks.


ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"
SHARD = ("dp_shard",)
BOTH = ("dp_shard", "dp_replicate")


@preset("the batch and optimizer state", "W + G + O/n", f"{ZERO}, stage 1")
def zero_1(ranks: int) -> Plan:
    """The optimizer's state is cut."""
    return Plan(Mesh(dp_shard=ranks), shard_optimizer=SHARD)


@preset("the batch, gradients and optimizer state", "W + (G + O)/n", f"{ZERO}, stage 2")
def zero_2(ranks: int) -> Plan:
    """Gradients and the optimizer's state are cut."""
    return Plan(Mesh(dp_shard=ranks), shard_gradients=SHARD, shard_optimizer=SHARD)


@preset("as fsdp, with microbatches", "(W + G + O)/n", f"{ZERO}, stage 3")
def zero_3(ranks: int) -> Plan:
    """Everything is cut."""
    return _fully_sharded(Mesh(dp_shard=ranks))


@preset("the batch; all else within each of two replicas", "(W + G + O)/s", "Zhao et al. 2023, arXiv 2304.11277")
def hsdp(ranks: int) -> Plan:
    """Everything is cut within two halves of the ranks; the halves are replicas, reduced once a step."""
    return _fully_sharded(_two_replicas(ranks))


@preset("as hsdp; optimizer state over all ranks", "(W + G)/s + O/n", "Levanter, issue 325")
def partially_sharded(ranks: int) -> Plan:
    """Cut as `hsdp` does, with the optimizer's state over all ranks."""
    return Plan(_two_replicas(ranks), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=BOTH)


def pipelined(schedule: str) -> Preset:
    """Make a plan of one pipeline of all ranks."""
    return lambda ranks: Plan(Mesh(pp=ranks), schedule)


for schedule in SCHEDULES.values():
    preset(
        f"the layers{'' if schedule.stages_per_rank == 1 else ', in loops'}; the batch over time",
        "(W + G + O)/p",
        schedule.source,
        name=schedule.name,
    )(pipelined(schedule.name))


@preset("the layers, and all that fsdp splits", "W/p + (W + G + O)/n", "LLM Training Puzzles, puzzle 7")
def pipeline_fsdp(ranks: int) -> Plan:
    """A GPipe pipeline on a grid as square as can be, its stages fully sharded."""
    return _fully_sharded(_square(ranks), "gpipe")


@preset(
    "the layers, in loops, and all that fsdp splits", "W/(p*v) + (W + G + O)/n", "Lamy-Poirier 2022, arXiv 2211.05953"
)
def breadth_first_fsdp(ranks: int) -> Plan:
    """A breadth-first pipeline on such a grid, its stages fully sharded: weights are gathered once a visit."""
    return _fully_sharded(_square(ranks), "breadth-first")


@preset("the sequences", "W + G + O", "Liu et al. 2023, arXiv 2310.01889")
def context_parallel(ranks: int) -> Plan:
    """Sequences are cut; keys and values go round in a ring."""
    return Plan(Mesh(cp=ranks))


@preset(
    "the batch, the layers and their matrices",
    "(W + G + O)/(p*t)",
    "Narayanan et al. 2021, arXiv 2104.04473",
    ranks=8,
    name="3d",
)
def three_dimensional(ranks: int) -> Plan:
    """Pipeline and tensor parallelism over two ranks each, data parallelism over the rest."""
    if ranks % 4:
        raise UserError(f"{ranks} ranks do not divide by pp 2 x tp 2; give a multiple of 4, or a mesh by --pp and --tp")
    return Plan(Mesh(pp=2, dp_shard=ranks // 4, tp=2))


@preset(
    "as 3d, and sequences between the matrices",
    "(W + G + O)/(p*t)",
    "Korthikanti et al. 2022, arXiv 2205.05198",
    ranks=8,
    name="4d",
)
def four_dimensional(ranks: int) -> Plan:
    """Three-dimensional parallelism with sequences cut over the tensor-parallel ranks."""
    return replace(three_dimensional(ranks), sequence_parallel=True)


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
    """Choose as many pipeline stages as the largest divisor not above the root of the ranks."""
    stages = max(n for n in range(1, math.isqrt(max(ranks, 1)) + 1) if ranks % n == 0)
    return Mesh(pp=stages, dp_shard=ranks // stages)


def find(name: str) -> StrategyEntry:
    """The built-in strategy of this name; `_` is as good as `-`.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    if (spelled := name.replace("_", "-")) in STRATEGIES:
        return STRATEGIES[spelled]
    raise unknown("strategy", name, STRATEGIES, " and path/to/file.py:function")


for module in iter_modules(__path__):
    import_module(f"{__name__}.{module.name}")

STRATEGIES = {entry.name: entry for entry in sorted(DECLARED, key=lambda entry: entry.order)}
"""Every built-in strategy by name."""

__all__ = ["STRATEGIES", "Plan", "StrategyEntry", "find"]
