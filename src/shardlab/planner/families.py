"""Families of plans, by the names that the field gives them."""

from __future__ import annotations

from shardlab.program import Mesh
from shardlab.strategies.plan import Plan

ORDER = ("data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "HSDP")
"""The families of data parallelism alone, in the order of a table; others follow."""


def family(plan: Plan) -> str:
    """The family of a plan: how data parallelism shares the model, if there is no other; else the other kinds.

    >>> family(Plan(Mesh(dp_shard=8), shard_optimizer=("dp_shard",)))
    'ZeRO-1'
    >>> family(Plan(Mesh(dp_shard=2, tp=2, pp=2)))
    '3D: TP + PP'
    """
    kinds = model_kinds(plan.mesh)
    if kinds:
        return kinds
    if plan.mesh.world == 1:
        return "one device"
    stage = plan.zero_stage
    return "HSDP" if stage == 3 and plan.mesh.dp_replicate > 1 else f"ZeRO-{stage}" if stage else "data parallel"


def model_kinds(mesh: Mesh) -> str:
    """The kinds of parallelism beside the data's: `TP + CP`; "": none."""
    used = [axis.upper() for axis in ("tp", "pp", "cp", "ep") if getattr(mesh, axis) > 1]
    named = " + ".join(used)
    return f"{len(used) + 1}D: {named}" if len(used) > 1 and mesh.dp_shard * mesh.dp_replicate > 1 else named


def by_order(name: str) -> tuple[int, str]:
    """A key that sorts families as a table has them."""
    known = [place for place, each in enumerate(ORDER) if name.startswith(each)]
    return (known[-1] if known else len(ORDER) + name.count("+"), name)
