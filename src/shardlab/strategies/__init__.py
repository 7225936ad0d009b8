"""The built-in strategies, one short file each: read them in the order of this table."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from shardlab.program import Mesh, Strategy, UserError
from shardlab.strategies.ddp import ddp
from shardlab.strategies.fsdp import fsdp
from shardlab.strategies.gpipe import gpipe
from shardlab.strategies.grad_accum import grad_accum
from shardlab.strategies.pipeline import pipeline
from shardlab.strategies.pipeline_fsdp import pipeline_fsdp, pipeline_fsdp_mesh
from shardlab.strategies.single import single
from shardlab.strategies.wsdp import wsdp


def data_parallel_mesh(ranks: int) -> Mesh:
    """All ranks on the axis that shards data."""
    return Mesh(dp_shard=ranks)


def pipeline_mesh(ranks: int) -> Mesh:
    """All ranks on the pipeline axis."""
    return Mesh(pp=ranks)


def one_device_mesh(ranks: int) -> Mesh:
    """One rank, and no more."""
    if ranks != 1:
        raise UserError(f"this strategy runs on one device, but {ranks} ranks were asked for; give --ranks 1")
    return Mesh()


@dataclass(frozen=True)
class Entry:
    """A row of the table of strategies.

    Attributes:
        name: what the command line calls it.
        program: the strategy.
        splits: what is split over the ranks.
        source: where it was described.
        mesh: the grid that it uses for a number of ranks.
    """

    name: str
    program: Strategy
    splits: str
    source: str
    mesh: Callable[[int], Mesh] = data_parallel_mesh


STRATEGIES = {
    entry.name: entry
    for entry in (
        Entry("single", single, "nothing", "LLM Training Puzzles, puzzle 0", one_device_mesh),
        Entry("grad_accum", grad_accum, "nothing; one microbatch at a time", "puzzle 1", one_device_mesh),
        Entry("ddp", ddp, "the batch", "Li et al. 2020, arXiv 2006.15704"),
        Entry("wsdp", wsdp, "the batch, weights and optimizer state", "puzzle 3"),
        Entry("fsdp", fsdp, "the batch, weights, gradients and optimizer state", "ZeRO-3, arXiv 1910.02054"),
        Entry("pipeline", pipeline, "the layers", "puzzle 5", pipeline_mesh),
        Entry("gpipe", gpipe, "the layers; the batch over time", "Huang et al. 2019, arXiv 1811.06965", pipeline_mesh),
        Entry("pipeline_fsdp", pipeline_fsdp, "the layers, and all that fsdp splits", "puzzle 7", pipeline_fsdp_mesh),
    )
}


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
