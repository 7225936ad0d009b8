"""Plans by name, for any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan

Preset = Callable[[int], Plan]
"""A number of ranks to a plan for that many."""

SHARD = ("dp_shard",)
BOTH = ("dp_shard", "dp_replicate")


def pipelined(schedule: str) -> Preset:
    """Make a plan of one pipeline of all ranks."""
    return lambda ranks: Plan(Mesh(pp=ranks), schedule)


def zero_1(ranks: int) -> Plan:
    """The optimizer's state is cut."""
    return Plan(Mesh(dp_shard=ranks), shard_optimizer=SHARD)


def zero_2(ranks: int) -> Plan:
    """Gradients and the optimizer's state are cut."""
    return Plan(Mesh(dp_shard=ranks), shard_gradients=SHARD, shard_optimizer=SHARD)


def zero_3(ranks: int) -> Plan:
    """Everything is cut."""
    return _fully_sharded(Mesh(dp_shard=ranks))


def hsdp(ranks: int) -> Plan:
    """Everything is cut within two halves of the ranks; the halves are replicas, reduced once a step."""
    return _fully_sharded(_two_replicas(ranks))


def partially_sharded(ranks: int) -> Plan:
    """Cut as `hsdp` does, with the optimizer's state over all ranks."""
    return Plan(_two_replicas(ranks), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=BOTH)


def pipeline_fsdp(ranks: int) -> Plan:
    """A GPipe pipeline on a grid as square as can be, its stages fully sharded."""
    return _fully_sharded(_square(ranks), "gpipe")


def breadth_first_fsdp(ranks: int) -> Plan:
    """A breadth-first pipeline on such a grid, its stages fully sharded: weights are gathered once a visit."""
    return _fully_sharded(_square(ranks), "breadth-first")


def context_parallel(ranks: int) -> Plan:
    """Sequences are cut; keys and values go round in a ring."""
    return Plan(Mesh(cp=ranks))


def three_dimensional(ranks: int) -> Plan:
    """Pipeline and tensor parallelism over two ranks each, data parallelism over the rest."""
    if ranks % 4:
        raise UserError(f"{ranks} ranks do not divide by pp 2 x tp 2; give a multiple of 4, or a mesh by --pp and --tp")
    return Plan(Mesh(pp=2, dp_shard=ranks // 4, tp=2))


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
