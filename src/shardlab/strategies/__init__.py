"""The built-in strategies, one short file each: read them in the order of this table."""

from __future__ import annotations

import difflib

from shardlab.program import UserError
from shardlab.strategies.ddp import ddp
from shardlab.strategies.entry import Entry, data_parallel_mesh, expert_parallel_mesh, one_device_mesh, pipeline_mesh
from shardlab.strategies.expert_parallel import expert_parallel
from shardlab.strategies.fsdp import fsdp
from shardlab.strategies.gpipe import gpipe
from shardlab.strategies.grad_accum import grad_accum
from shardlab.strategies.pipeline import pipeline
from shardlab.strategies.pipeline_fsdp import pipeline_fsdp, pipeline_fsdp_mesh
from shardlab.strategies.scheduled import scheduled
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.single import single
from shardlab.strategies.wsdp import wsdp

one_f_one_b = scheduled(SCHEDULES["1f1b"])
interleaved_one_f_one_b = scheduled(SCHEDULES["interleaved-1f1b"])
breadth_first = scheduled(SCHEDULES["breadth-first"])

STRATEGIES = {
    entry.name: entry
    for entry in (
        Entry("single", single, "nothing", "LLM Training Puzzles, puzzle 0", one_device_mesh, 1),
        Entry("grad_accum", grad_accum, "nothing; one microbatch at a time", "puzzle 1", one_device_mesh, 1),
        Entry("ddp", ddp, "the batch", "Li et al. 2020, arXiv 2006.15704"),
        Entry("wsdp", wsdp, "the batch, weights and optimizer state", "puzzle 3"),
        Entry("fsdp", fsdp, "the batch, weights, gradients and optimizer state", "ZeRO-3, arXiv 1910.02054"),
        Entry("pipeline", pipeline, "the layers", "puzzle 5", pipeline_mesh),
        Entry("gpipe", gpipe, "the layers; the batch over time", "Huang et al. 2019, arXiv 1811.06965", pipeline_mesh),
        Entry("1f1b", one_f_one_b, "the layers; the batch over time", "arXiv 2104.04473, fig. 4, top", pipeline_mesh),
        Entry(
            "interleaved-1f1b",
            interleaved_one_f_one_b,
            "the layers, in loops; the batch over time",
            "arXiv 2104.04473, fig. 4, bottom",
            pipeline_mesh,
        ),
        Entry(
            "breadth-first",
            breadth_first,
            "the layers, in loops; the batch over time",
            "arXiv 2211.05953, fig. 4",
            pipeline_mesh,
        ),
        Entry("pipeline_fsdp", pipeline_fsdp, "the layers, and all that fsdp splits", "puzzle 7", pipeline_fsdp_mesh),
        Entry(
            "expert_parallel",
            expert_parallel,
            "the batch and the experts",
            "GShard, arXiv 2006.16668",
            expert_parallel_mesh,
        ),
    )
}
"""Every built-in strategy by name."""


def find(name: str) -> Entry:
    """The built-in strategy of this name.

    Raises:
        UserError: if there is none; the nearest name is suggested.
    """
    if name not in STRATEGIES:
        near = difflib.get_close_matches(name, STRATEGIES, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "give a built-in name or path/to/file.py:function."
        raise UserError(f"there is no strategy {name!r}; {hint} Built in: {', '.join(STRATEGIES)}")
    return STRATEGIES[name]


__all__ = [
    "STRATEGIES",
    "Entry",
    "breadth_first",
    "data_parallel_mesh",
    "ddp",
    "expert_parallel",
    "find",
    "fsdp",
    "gpipe",
    "grad_accum",
    "interleaved_one_f_one_b",
    "one_device_mesh",
    "one_f_one_b",
    "pipeline",
    "pipeline_fsdp",
    "single",
    "wsdp",
]
