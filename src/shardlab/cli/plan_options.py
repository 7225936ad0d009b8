"""Flags that lay a model over a mesh, and what they make of a strategy's name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardlab.cli.options import Flag, OptionalCount
from shardlab.program import AXES, Mesh, UserError
from shardlab.rules.pieces import counted
from shardlab.strategies import STRATEGIES
from shardlab.strategies.entry import Entry, planned_entry
from shardlab.strategies.load import load
from shardlab.strategies.plan import Context, Plan, ReduceAt, Reshard
from shardlab.strategies.plan_file import read_plan

Axes = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="AXIS ...", help_behavior_hint="")]
Word = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True)
class PlanOptions:
    """A plan by flags, which change the plan that the strategy's name or --plan stands for.

    If an axis of the mesh is given here, all are: no axis that the plan has may be left out.
    """

    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A plan in a TOML file: the fields of shardlab.strategies.plan.Plan."""

    pp: OptionalCount = None
    """Pipeline ranks."""

    dp_replicate: OptionalCount = None
    """Replicas of the model."""

    dp_shard: OptionalCount = None
    """Data-parallel ranks that may share weights, gradients or optimizer state."""

    cp: OptionalCount = None
    """Context-parallel ranks, over which sequences are cut."""

    ep: OptionalCount = None
    """Expert-parallel ranks, over which the experts of a mixture are cut."""

    tp: OptionalCount = None
    """Tensor-parallel ranks, over which the matrices of half-blocks are cut."""

    sequence_parallel: Flag = False
    """Cut what lies between the matrices along the sequence, over the same ranks."""

    schedule: Word = None
    """The pipeline's order of work: a built-in one, path/to/file.py:generator, or a CSV of PyTorch's."""

    stages_per_rank: OptionalCount = None
    """Pipeline stages on each rank."""

    layers_per_stage: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = None
    """How many layers each stage has."""

    shard_parameters: Axes = None
    """Axes over which weights are cut: dp_shard, dp_replicate, cp, or nothing."""

    shard_gradients: Axes = None
    """Axes over which accumulating gradients are cut."""

    shard_optimizer: Axes = None
    """Axes over which the optimizer's state is cut."""

    reduce_each: Axes = None
    """Axes over which gradients are reduced at each microbatch rather than once a step."""

    reduce_at: Annotated[ReduceAt | None, tyro.conf.arg(metavar="{layer,step}", help_behavior_hint="")] = None
    """When gradients that are reduced once a step are: as soon as a layer's is whole, or when all are."""

    context: Annotated[Context | None, tyro.conf.arg(metavar="{ring,all_gather}", help_behavior_hint="")] = None
    """How queries meet the keys and values of other context-parallel ranks."""

    reshard_after: Annotated[Reshard | None, tyro.conf.arg(metavar="{layer,stage,step}", help_behavior_hint="")] = None
    """When gathered weights are freed."""

    recompute: Annotated[
        tuple[str, ...] | None, tyro.conf.arg(metavar="{none,selective,full,BLOCK ...}", help_behavior_hint="")
    ] = None
    """What the backward pass computes again: nothing, attention's scores, everything, or blocks by number."""

    def entry(self, name: str | None, ranks: int | None) -> tuple[Entry, int]:
        """The strategy that is meant, and on how many ranks.

        Args:
            name: a strategy's, if one is given.
            ranks: how many were asked for, or are there; None if nobody says.

        Raises:
            UserError: when the flags contradict the strategy, the number of ranks or each other.
        """
        given: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        given = {field: value for field, value in given.items() if value not in (None, False)}
        path: Path | None = given.pop("plan", None)
        if "recompute" in given:
            given["recompute"] = _recomputed(given["recompute"])
        if name is None and path is None and not given:
            raise UserError(
                "no strategy is named; give one (shardlab strategies lists them), --plan FILE, or flags such as --pp 2"
            )
        if name is not None and path is not None:
            raise UserError(f"both {name} and --plan {path} were given; give one of them")
        if not given and name is not None:
            entry = load(name)
            return entry, ranks or entry.ranks
        axes = {axis: given.pop(axis) for axis in AXES if axis in given}
        plan = _base(name, path, None if axes else ranks)
        if axes:
            _want_all_axes(axes, plan.mesh, name or str(path))
        plan = replace(plan, mesh=Mesh(**axes) if axes else plan.mesh, **given)
        if ranks not in (None, plan.mesh.world):
            sizes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1) or "1 rank"
            raise UserError(
                f"there are to be {counted(ranks, 'rank')}, but the plan's mesh is {sizes}; "
                f"leave out --ranks or change the mesh"
            )
        return planned_entry(plan, name or (str(path) if path else "plan")), plan.mesh.world


def _want_all_axes(axes: dict[str, int], mesh: Mesh, name: str) -> None:
    """Refuse flags that would silently undo what a plan is named for."""
    has = {axis: size for axis, size in mesh.sizes().items() if size > 1}
    if forgotten := [axis for axis in has if axis not in axes]:
        said = " ".join(f"--{axis.replace('_', '-')} {size}" for axis, size in {**has, **axes}.items())
        raise UserError(
            f"the mesh of {name} has {' x '.join(has)}, but {' and '.join(forgotten)} is left out; give every axis, "
            f"such as {said}"
        )


def _base(name: str | None, path: Path | None, ranks: int | None) -> Plan:
    """The plan that the flags change."""
    if path is not None:
        return read_plan(path)
    if name is None:
        return Plan(Mesh(dp_shard=ranks or 1))
    entry = load(name)
    if entry.plan is None:
        plans = ", ".join(known for known, row in STRATEGIES.items() if row.plan is not None)
        raise UserError(
            f"{name} is a program of its own, which flags do not change; leave out the name, or start from one of "
            f"{plans}"
        )
    return entry.plan(ranks or entry.ranks)


NO_FLAGS = PlanOptions()

Layout = Annotated[PlanOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""The flags, as a command's field; their names stand alone."""


def _recomputed(words: tuple[str, ...]) -> str | tuple[int, ...]:
    """A word for the plan to judge, or the numbers of blocks."""
    if words and all(word.isdecimal() for word in words):
        return tuple(int(word) for word in words)
    return " ".join(words)
