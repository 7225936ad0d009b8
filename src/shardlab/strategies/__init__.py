"""Built-in strategies: read the short files in the order of this table; the rest are plans, rows of one program."""

from __future__ import annotations

from shardlab.errors import unknown
from shardlab.strategies import presets
from shardlab.strategies.column_parallel import column_parallel
from shardlab.strategies.ddp import ddp
from shardlab.strategies.entry import (
    StrategyEntry,
    data_parallel_mesh,
    expert_parallel_mesh,
    one_device_mesh,
    pipeline_mesh,
    preset_entry,
)
from shardlab.strategies.expert_parallel import expert_parallel
from shardlab.strategies.fsdp import fsdp
from shardlab.strategies.grad_accum import grad_accum
from shardlab.strategies.pipeline import pipeline
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.single import single
from shardlab.strategies.tensor_parallel import tensor_parallel, tensor_parallel_mesh
from shardlab.strategies.wsdp import wsdp

ALL = "W + G + O"
ZERO = "Rajbhandari et al. 2020, arXiv 1910.02054"

PAGES = (
    StrategyEntry("single", single, "nothing", "LLM Training Puzzles, puzzle 0", one_device_mesh, 1, memory=ALL),
    StrategyEntry(
        "grad-accum",
        grad_accum,
        "nothing; the batch over time",
        "LLM Training Puzzles, puzzle 1",
        one_device_mesh,
        1,
        memory=ALL,
    ),
    StrategyEntry("ddp", ddp, "the batch", "Li et al. 2020, arXiv 2006.15704", memory=ALL),
    StrategyEntry(
        "wsdp",
        wsdp,
        "the batch, weights and optimizer state",
        "LLM Training Puzzles, puzzle 3",
        memory="G + (W + O)/n",
    ),
    StrategyEntry(
        "fsdp", fsdp, "the batch, weights, gradients and optimizer state", f"{ZERO}, stage 3", memory="(W + G + O)/n"
    ),
    StrategyEntry(
        "column-parallel",
        column_parallel,
        "the columns of every matrix",
        "Stanford CS336, spring 2025, lecture 8",
        tensor_parallel_mesh,
        2,
        memory="(W + G + O)/t",
        columns=True,
    ),
    StrategyEntry(
        "tensor-parallel",
        tensor_parallel,
        "the matrices of every layer",
        "Shoeybi et al. 2019, arXiv 1909.08053",
        tensor_parallel_mesh,
        2,
        memory="(W + G + O)/t",
    ),
    StrategyEntry(
        "expert-parallel",
        expert_parallel,
        "the batch and the experts",
        "Lepikhin et al. 2020, GShard, arXiv 2006.16668",
        expert_parallel_mesh,
        memory="D + E/n of W, G and O",
    ),
    StrategyEntry(
        "pipeline", pipeline, "the layers", "LLM Training Puzzles, puzzle 5", pipeline_mesh, memory="(W + G + O)/p"
    ),
)
"""Programs to read, each a short file of its own."""

SHARDED = (
    preset_entry("zero-1", presets.zero_1, "the batch and optimizer state", "W + G + O/n", f"{ZERO}, stage 1"),
    preset_entry(
        "zero-2", presets.zero_2, "the batch, gradients and optimizer state", "W + (G + O)/n", f"{ZERO}, stage 2"
    ),
    preset_entry("zero-3", presets.zero_3, "as fsdp, with microbatches", "(W + G + O)/n", f"{ZERO}, stage 3"),
    preset_entry(
        "hsdp",
        presets.hsdp,
        "the batch; all else within each of two replicas",
        "(W + G + O)/s",
        "Zhao et al. 2023, arXiv 2304.11277",
    ),
    preset_entry(
        "partially-sharded",
        presets.partially_sharded,
        "as hsdp; optimizer state over all ranks",
        "(W + G)/s + O/n",
        "Levanter, issue 325",
    ),
)
"""Ways to shard over data-parallel ranks."""

PIPELINES = tuple(
    preset_entry(
        schedule.name,
        presets.pipelined(schedule.name),
        f"the layers{'' if schedule.stages_per_rank == 1 else ', in loops'}; the batch over time",
        "(W + G + O)/p",
        schedule.source,
    )
    for schedule in SCHEDULES.values()
)
"""Every schedule, on a pipeline of all ranks."""

COMPOSED = (
    preset_entry(
        "pipeline-fsdp",
        presets.pipeline_fsdp,
        "the layers, and all that fsdp splits",
        "W/p + (W + G + O)/n",
        "LLM Training Puzzles, puzzle 7",
    ),
    preset_entry(
        "breadth-first-fsdp",
        presets.breadth_first_fsdp,
        "the layers, in loops, and all that fsdp splits",
        "W/(p*v) + (W + G + O)/n",
        "Lamy-Poirier 2022, arXiv 2211.05953",
    ),
    preset_entry(
        "context-parallel",
        presets.context_parallel,
        "the sequences",
        ALL,
        "Liu et al. 2023, arXiv 2310.01889",
    ),
    preset_entry(
        "3d",
        presets.three_dimensional,
        "the batch, the layers and their matrices",
        "(W + G + O)/(p*t)",
        "Narayanan et al. 2021, arXiv 2104.04473",
        8,
    ),
    preset_entry(
        "4d",
        presets.four_dimensional,
        "as 3d, and sequences between the matrices",
        "(W + G + O)/(p*t)",
        "Korthikanti et al. 2022, arXiv 2205.05198",
        8,
    ),
)
"""Products of both."""

STRATEGIES = {entry.name: entry for entry in (*PAGES, *SHARDED, *PIPELINES, *COMPOSED)}
"""Every built-in strategy by name."""


def find(name: str) -> StrategyEntry:
    """The built-in strategy of this name; `_` is as good as `-`.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    if (spelled := name.replace("_", "-")) in STRATEGIES:
        return STRATEGIES[spelled]
    raise unknown("strategy", name, STRATEGIES, " and path/to/file.py:function")


__all__ = [
    "COMPOSED",
    "PAGES",
    "PIPELINES",
    "SHARDED",
    "STRATEGIES",
    "Plan",
    "StrategyEntry",
    "column_parallel",
    "data_parallel_mesh",
    "ddp",
    "expert_parallel",
    "find",
    "fsdp",
    "grad_accum",
    "one_device_mesh",
    "pipeline",
    "planned",
    "single",
    "tensor_parallel",
    "wsdp",
]
