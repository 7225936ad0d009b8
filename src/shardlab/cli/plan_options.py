"""Flags that lay a model over a mesh, and what they make of a strategy's name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from shardlab.cli.options import OptionalCount, switch_flags, switched
from shardlab.program import AXES, Mesh, UserError
from shardlab.program.field_types import COUNT, as_flags, field_helps, field_types
from shardlab.program.pass_names import with_offload
from shardlab.rules.pieces import counted
from shardlab.strategies import STRATEGIES
from shardlab.strategies.entry import StrategyEntry, planned_entry
from shardlab.strategies.load import load
from shardlab.strategies.plan import UNNAMED, Plan
from shardlab.strategies.plan_file import read_plan


@dataclass(frozen=True)
class PlanOptions:
    """A plan by flags, which change the plan that the strategy's name or --plan stands for.

    If an axis of the mesh is given here, all are: no axis that the plan has may be left out.
    """

    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with a plan: the fields of shardlab.strategies.plan.Plan. For train, auto chooses a plan for this
    machine."""

    offload: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="WHAT=WHERE", help_behavior_hint="")] = None
    """What each rank keeps on the host or the disk instead of its device: parameters, optimizer, gradients or
    activations, such as optimizer=host activations=disk."""

    def given(self) -> dict[str, Any]:
        """The flags that are given, by field.

        Raises:
            UserError: when they contradict each other.
        """
        every: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, each in field_types(Plan).items():
            if each.words is bool:
                every[name] = switched(self, name)
                del every[f"no_{name}"]
        if words := every.pop("offload"):
            if "offload=" in (every["passes"] or ""):
                raise UserError("both --offload and --passes offload=... are given; give one of them")
            every["passes"] = with_offload(every["passes"], words)
        return {field: value for field, value in every.items() if value is not None}

    @property
    def names_mesh(self) -> bool:
        """Whether axes of the mesh are given."""
        return any(getattr(self, axis) is not None for axis in AXES)

    @property
    def names_plan(self) -> bool:
        """Whether flags say anything of a plan that cannot be said of any program."""
        return bool(self.given().keys() - {"passes"})

    def entry(
        self,
        name: str | None,
        ranks: int | None,
        base: Plan | None = None,
        *,
        passes: str | None = None,
        follows: bool = False,
    ) -> tuple[StrategyEntry, int]:
        """The strategy that is meant, and on how many ranks.

        Args:
            name: a strategy's, if one is given, or that of `base`.
            ranks: how many were asked for, or are there; None if nobody says.
            base: a plan that the flags change, if there is one; --plan takes its place.
            passes: what rewrites a program of its own, where no flag says.
            follows: the mesh follows the number of ranks, where it is another.

        Raises:
            UserError: when the flags contradict the strategy, the number of ranks or each other.
        """
        given, words = self.given(), self.offload if getattr(self, "passes", None) is None else None
        path: Path | None = given.pop("plan", None)
        if name is None and path is None and not given:
            raise UserError(
                "no strategy is given; give a name (shardlab strategies lists them), --plan FILE, or flags such "
                "as --pp 2"
            )
        if name is not None and path is not None:
            raise UserError(f"both {name} and --plan {path} were given; give one of them")
        if name is not None and base is None and given.keys() <= {"passes"}:
            entry = load(name, with_offload(passes, words) if words else given.get("passes", passes))
            if entry.plan is None or not given:
                return entry, ranks or entry.ranks
        axes = {axis: given.pop(axis) for axis in AXES if axis in given}
        plan = base or _base(name, path, None if axes else ranks)
        if words:
            given["passes"] = with_offload(plan.passes, words)
        if axes:
            _want_all_axes(axes, plan.mesh, name or str(path))
        changed = {name: field_types(Plan)[name].of_words(words) for name, words in given.items()}
        plan = replace(plan, mesh=Mesh(**axes) if axes else plan.mesh, **changed)
        if follows and ranks is not None:
            plan = plan.on(ranks)
        if ranks not in (None, plan.mesh.world):
            raise UserError(
                f"the plan's mesh {plan.mesh} does not fit on {counted(ranks, 'rank')}; leave out --ranks or change "
                "the mesh"
            )
        return planned_entry(plan, name or (str(path) if path else UNNAMED)), plan.mesh.world


def _want_all_axes(axes: dict[str, int], mesh: Mesh, name: str) -> None:
    """Refuse flags that would silently undo what a plan is named for."""
    has = mesh.used
    if forgotten := [axis for axis in has if axis not in axes]:
        raise UserError(
            f"the mesh of {name} has {' x '.join(has)}, but {' and '.join(forgotten)} is left out; give every axis, "
            f"such as {as_flags({**has, **axes})}"
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
            f"{name} is a program, which flags cannot change; leave out the name, or start from one of {plans}"
        )
    return entry.plan(ranks or entry.ranks)


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """List each option's name, its type for tyro, and its value if it is not given."""
    types = dict.fromkeys(AXES, COUNT) | field_types(Plan)
    helps = field_helps(Mesh) | field_helps(Plan)
    for name, written in types.items():
        about = tyro.conf.arg(metavar=written.metavar or None, help=helps[name], help_behavior_hint="")
        if written.words is bool:
            yield from switch_flags(name, helps[name])
        else:
            yield name, Annotated[OptionalCount if written.words is int else written.words | None, about], None


plan_flags: Callable[..., PlanOptions] = make_dataclass("PlanFlags", _flags(), bases=(PlanOptions,), frozen=True)
"""The options with a flag for each axis of the mesh, and for each other field of a plan."""

NO_FLAGS = plan_flags()


_ABSENT: Any = Annotated[None, tyro.conf.Suppress]

limit_flags: Callable[..., PlanOptions] = make_dataclass(
    "LimitFlags",
    [(name, _ABSENT, None) for name in ("plan", "passes", "offload", "freeze")],
    bases=(plan_flags,),
    frozen=True,
)
"""The flags of a search: none names a whole plan, rewrites its program, or freezes blocks."""

NO_LIMITS = limit_flags()

Layout = Annotated[PlanOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""The flags, as a command's field; their names stand alone."""
