"""The flags that lay a model over a mesh, and what they make of a strategy's name."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardlab.cli.options import OptionalCount
from shardlab.program import AXES, Mesh, UserError
from shardlab.strategies import STRATEGIES
from shardlab.strategies.entry import Entry, planned_entry
from shardlab.strategies.load import load
from shardlab.strategies.plan import Plan, Recompute, Reshard
from shardlab.strategies.plan_file import read_plan

Axes = Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="AXIS ...", help_behavior_hint="")]
Word = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]


@dataclass(frozen=True)
class PlanOptions:
    """A plan by flags: they change the plan that the strategy's name or --plan stands for."""

    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """A plan in a TOML file: the fields of shardlab.strategies.plan.Plan."""

    pp: OptionalCount = None
    """Pipeline ranks."""

    dp_replicate: OptionalCount = None
    """Replicas of the model."""

    dp_shard: OptionalCount = None
    """Data-parallel ranks among which parameters, gradients or optimizer state may be cut."""

    schedule: Word = None
    """The pipeline's order of work."""

    stages_per_rank: OptionalCount = None
    """Pipeline stages on each rank."""

    layers_per_stage: Annotated[tuple[int, ...] | None, tyro.conf.arg(metavar="N ...", help_behavior_hint="")] = None
    """How many layers each stage has."""

    shard_parameters: Axes = None
    """Axes over which weights are cut: dp_shard, dp_replicate, or nothing."""

    shard_gradients: Axes = None
    """Axes over which accumulating gradients are cut."""

    shard_optimizer: Axes = None
    """Axes over which the optimizer's state is cut."""

    reduce_each: Axes = None
    """Axes over which gradients are reduced at each microbatch rather than once a step."""

    reshard_after: Annotated[Reshard | None, tyro.conf.arg(help_behavior_hint="")] = None
    """When gathered weights are freed."""

    recompute: Annotated[Recompute | None, tyro.conf.arg(help_behavior_hint="")] = None
    """What the backward pass computes again."""

    def given(self) -> dict[str, Any]:
        """The fields that somebody has set."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}

    def entry(self, name: str | None, ranks: int | None) -> tuple[Entry, int]:
        """The strategy that is meant, and on how many ranks.

        Raises:
            UserError: when the flags contradict the strategy, the number of ranks or each other.
        """
        given = self.given()
        path = given.pop("plan", None)
        if name is None and path is None and not given:
            raise UserError(
                "no strategy is named; give a name (see shardlab strategies), --plan FILE or a plan's flags"
            )
        if name is not None and path is not None:
            raise UserError(f"both {name} and --plan {path} were given; give one of them")
        if not given and name is not None:
            entry = load(name)
            return entry, ranks or entry.ranks
        axes = {axis: given.pop(axis) for axis in AXES if axis in given}
        plan = replace(_base(name, path, Mesh(**axes).world if axes else ranks), **given)
        if axes:
            plan = replace(plan, mesh=Mesh(**axes))
        if ranks not in (None, plan.mesh.world):
            raise UserError(
                f"{ranks} ranks were asked for, but the plan's mesh has {plan.mesh.world}; leave out --ranks"
            )
        return planned_entry(plan, name or (str(path) if path else "a plan")), plan.mesh.world


def _base(name: str | None, path: Path | None, ranks: int | None) -> Plan:
    """The plan that the flags change."""
    if path is not None:
        return read_plan(path)
    if name is None:
        return Plan(Mesh(dp_shard=ranks or 1))
    entry = load(name)
    if entry.plan is None:
        plans = ", ".join(known for known, row in STRATEGIES.items() if row.plan is not None)
        raise UserError(f"{name} is a program of its own, which flags do not change; plans are {plans}")
    return entry.plan(ranks or entry.ranks)
