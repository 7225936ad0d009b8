"""Options for a plan, a recipe and a cluster, and the strategy that follows from them.

`PlanOptions.entry` combines the name of a strategy, a plan file and flags such as --pp 2 into one strategy.
`plan_flags` generates a flag for each axis of the mesh and each field of `Plan`, so a new field gets its flag
automatically. `checked` traces and checks a strategy. `recipe_called` and `cluster_called` find a recipe and a cluster
by name.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from shardlab.check import Checked, check
from shardlab.check.report import FileCheck
from shardlab.cli.model_options import print_notes
from shardlab.cli.options import OptionalCount, switch_flags, switch_value
from shardlab.common.fields import COUNT, as_flags, field_helps, field_types
from shardlab.common.files import read_file
from shardlab.common.text import counted, parse_bytes
from shardlab.common.user_code import file_and_name
from shardlab.language import AXES, Mesh, Sizes, UserError, trace
from shardlab.language.pass_names import with_offload
from shardlab.strategies import STRATEGIES
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import UNNAMED, Plan, read_plan
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.config_sources import ConfigSource, file_source, origin_of, plan_settings

if TYPE_CHECKING:
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.predict.recipe import Recipe


_ABSENT: Any = Annotated[None, tyro.conf.Suppress]

RecipeName = Annotated[
    str | None,
    tyro.conf.arg(
        metavar="NAME|FILE",
        help="Recipe, which describes how a framework runs a step, such as megatron-core or torchtitan (see shardlab "
        "recipes), or path/to/recipe.toml.",
        help_behavior_hint="(default: shardlab)",
    ),
]
"""Name of a recipe, which describes how a framework runs a step. None stands for Shardlab's own."""

SwitchWords = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="NAME=VALUE ...",
        help="Options of the framework, such as attention=flash2 (shardlab recipes NAME lists them).",
        help_behavior_hint="(default: the framework's)",
    ),
]
"""Values of a recipe's switches, each as the text NAME=VALUE."""

DeviceMemory = Annotated[str | None, tyro.conf.arg(metavar="BYTES", help_behavior_hint="(default: all of it)")]
"""Memory of each device that a step may use, such as 72GiB."""


@dataclass(frozen=True)
class PlanOptions:
    """Flags of a plan, which change the plan of the named strategy or of --plan.

    If one axis of the mesh is given, all axes of the mesh must be given.
    """

    plan: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")] = None
    """TOML file with a plan: the fields of shardlab.strategies.Plan, or a job with a table [plan]. For train, auto
    chooses a plan for this machine."""

    offload: Annotated[tuple[str, ...] | None, tyro.conf.arg(metavar="WHAT=WHERE", help_behavior_hint="")] = None
    """Keep parameters, optimizer, gradients or activations on the host or the disk instead of each rank's device, such
    as optimizer=host activations=disk."""

    def flag_values(self) -> dict[str, Any]:
        """Return the values of the given flags, by field.

        Raises:
            UserError: if flags contradict each other.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, field_type in field_types(Plan).items():
            if field_type.words is bool:
                values[name] = switch_value(self, name)
                del values[f"no_{name}"]
        if words := values.pop("offload"):
            if "offload=" in (values["passes"] or ""):
                raise UserError("both --offload and --passes offload=... are given; give one of them")
            values["passes"] = with_offload(values["passes"], words)
        return {field: value for field, value in values.items() if value is not None}

    def values(self) -> dict[str, Any]:
        """Return the values that flags give: sizes of mesh axes, and fields of a plan."""
        types, flags = field_types(Plan), self.flag_values()
        flags.pop("plan", None)
        return {name: words if name in AXES else types[name].of_words(words) for name, words in flags.items()}

    @property
    def names_mesh(self) -> bool:
        """Whether an axis of the mesh is given."""
        return any(getattr(self, axis) is not None for axis in AXES)

    @property
    def names_plan(self) -> bool:
        """Whether a flag is given that applies only to plans. All flags but --passes do."""
        return bool(self.flag_values().keys() - {"passes"})

    def entry(
        self,
        name: str | None,
        ranks: int | None,
        sources: Sequence[ConfigSource] = (),
        *,
        otherwise: int | None = None,
        follows: bool = False,
    ) -> tuple[StrategyEntry, int]:
        """Return the strategy with the changes that flags make, and its number of ranks.

        Args:
            name, ranks: name of the strategy and number of ranks on the command line (None: not given).
            sources: sources of lower precedence than the flags, such as a config file. They are used if the flags give
                neither a name, a plan nor a mesh.
            otherwise: number of ranks if neither flags nor sources give one (None: unknown).
            follows: whether to adapt the plan's mesh if it does not have the requested number of ranks.

        Raises:
            UserError: if the flags contradict the strategy, the number of ranks or each other.
        """
        base: Plan | None = None
        passes: str | None = None
        if name is None and self.plan is None:
            name, of_sources, base, passes = plan_settings(sources)
            if self.names_mesh:  # flags for the mesh describe a new plan
                name = base = passes = of_sources = None
            elif self.names_plan and origin_of(sources, "plan", "strategy") == "default":
                name = None
            ranks = ranks or of_sources
        ranks = ranks or otherwise
        flags, words = self.flag_values(), self.offload if getattr(self, "passes", None) is None else None
        path: Path | None = flags.pop("plan", None)
        if name is None and path is None and not flags:
            raise UserError(
                "no strategy is given; give a name (shardlab strategies lists them), --plan FILE, or flags such "
                "as --pp 2"
            )
        if name is not None and path is not None:
            raise UserError(f"both {name} and --plan {path} were given; give one of them")
        if name is not None and base is None and flags.keys() <= {"passes"}:
            entry = load(name, with_offload(passes, words) if words else flags.get("passes", passes))
            if entry.plan is None or (not flags and entry.name in STRATEGIES):
                return entry, ranks or entry.ranks
        axes = {axis: flags.pop(axis) for axis in AXES if axis in flags}
        plan = base or _base_plan(name, path, None if axes else ranks)
        if words:
            flags["passes"] = with_offload(plan.passes, words)
        if axes:
            _require_all_axes(axes, plan.mesh, name or str(path))
        changes = {name: field_types(Plan)[name].of_words(words) for name, words in flags.items()}
        plan = replace(plan, mesh=Mesh(**axes) if axes else plan.mesh, **changes)
        if follows and ranks is not None:
            plan = plan.on(ranks)
        idle_flags = [(name, reason) for name, reason in plan.without_effect().items() if name in changes]
        print_notes(tuple(f"--{name.replace('_', '-')} {reason}" for name, reason in idle_flags))
        if ranks not in (None, plan.mesh.world):
            raise UserError(
                f"the plan's mesh {plan.mesh} does not fit on {counted(ranks, 'rank')}; leave out --ranks or change "
                "the mesh"
            )
        return entry_from_plan(plan, name or (str(path) if path else UNNAMED)), plan.mesh.world


def checked(
    entry: StrategyEntry, ranks: int, layers: int | Sizes, microbatches: int, *, whole_matrices: bool = False
) -> Checked:
    """Trace a strategy and check it.

    Output that the user's program prints goes to stderr.

    Args:
        layers: number of layers of the puzzles' model, or sizes of another model.
        whole_matrices: whether the optimizer needs whole matrices of the puzzles' model, as Muon does.

    Raises:
        Refused: if the program is wrong. For a user's file, the message begins with the line at fault.
        UserError: if the sizes do not fit.
    """
    path, _ = file_and_name(entry.name)
    mesh = entry.grid(ranks)
    entry.require_ops(ranks, layers if isinstance(layers, int) else layers.layers, microbatches)
    if isinstance(layers, int) and layers > 0:
        layers = replace(entry.puzzle(ranks, layers), whole_matrices=whole_matrices)
    with contextlib.redirect_stdout(sys.stderr):
        if path is None or entry.plan is not None:
            return check(trace(entry.program, mesh, layers, microbatches))
        return FileCheck(entry.program, str(path)).check(mesh, layers, microbatches)


def cluster_called(name: str, *, other_machine: bool) -> Cluster:
    """Return the cluster that a name describes: `h100x16`, the path of a file, or `local` (this machine's profile).

    Only a profile needs torch, in order to identify this machine.

    Args:
        name: argument of `find_cluster`.
        other_machine: whether a profile of another machine is accepted.

    Raises:
        UserError: for an unknown name, or --other-machine without a profile.
    """
    from shardlab.simulate.hardware import find_cluster
    from shardlab.simulate.hardware.cluster import is_measured

    if not is_measured(name):
        if other_machine:
            raise UserError(
                f"--other-machine is for profiles, and {name} is not a profile; give --cluster local or "
                "FILE.json, or leave it out"
            )
        return find_cluster(name)
    from shardlab.measure.profile import this_machine

    return find_cluster(name, this_machine=this_machine(), other_machine=other_machine)


def limit_memory(cluster: Cluster, memory: str | None) -> Cluster:
    """Return a cluster with as much memory on each device as the user gives (None: all that the device has).

    Raises:
        UserError: if `memory` is no number of bytes, or more than a device has.
    """
    if memory is None:
        return cluster
    limit, device = parse_bytes(memory, "--memory"), cluster.device
    if limit > device.memory:
        raise UserError(
            f"--memory {memory} is more than {device.name} has, {device.memory / 2**30:.0f} GiB; give less, or another "
            "cluster"
        )
    return replace(cluster, device=replace(device, memory=limit))


def job_source(path: Path | None) -> ConfigSource:
    """Return the tables of a job file, or no tables if the path is None.

    Raises:
        UserError: if the file cannot be read, or has an unknown table or field.
    """
    return ConfigSource("", {}) if path is None else file_source(path)


def recipe_called(name: str | None, switches: Mapping[str, str] | None = None) -> Recipe:
    """Return the recipe with a name or from a file, or Shardlab's own recipe for None.

    Args:
        switches: values of its switches.

    Raises:
        UserError: if there is no such recipe or switch. The message suggests the nearest name.
    """
    from shardlab.simulate.predict.recipe import OWN, find_recipe

    return find_recipe(name or OWN.name, switches or {})


def switches_of(words: Sequence[str]) -> dict[str, str]:
    """Parse switches such as `attention=flash2` into a dictionary.

    Raises:
        UserError: if a text has another form, or a switch is given twice.
    """
    switches: dict[str, str] = {}
    for word in words:
        name, equals, value = (part.strip() for part in word.partition("="))
        if not (name and equals and value):
            raise UserError(f"--switch {word} is no switch; give NAME=VALUE, such as attention=flash2")
        if name in switches:
            raise UserError(f"--switch gives {name} twice; give it once")
        switches[name] = value
    return switches


JobFile = Annotated[
    Path | None,
    tyro.conf.arg(
        metavar="FILE",
        help="TOML file with a job, in tables such as [model], [cluster], [batch] and [plan], or the config.toml of a "
        "run. Flags override it.",
        help_behavior_hint="",
    ),
]
"""Job file. Each command reads only the tables that it needs."""

Layout = Annotated[PlanOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""Field type of a command that has these flags, without a prefix in their names."""


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each flag, its type for tyro, and its default."""
    types = dict.fromkeys(AXES, COUNT) | field_types(Plan)
    helps = field_helps(Mesh) | field_helps(Plan)
    for name, field_type in types.items():
        about = tyro.conf.arg(metavar=field_type.metavar or None, help=helps[name], help_behavior_hint="")
        if field_type.words is bool:
            yield from switch_flags(name, helps[name])
        else:
            yield name, Annotated[OptionalCount if field_type.words is int else field_type.words | None, about], None


plan_flags: Callable[..., PlanOptions] = make_dataclass("PlanFlags", _flags(), bases=(PlanOptions,), frozen=True)
"""Class of `PlanOptions` with a flag for each axis of the mesh and each other field of a plan."""

NO_FLAGS = plan_flags()

limit_flags: Callable[..., PlanOptions] = make_dataclass(
    "LimitFlags",
    [(name, _ABSENT, None) for name in ("plan", "passes", "offload", "freeze")],
    bases=(plan_flags,),
    frozen=True,
)
"""Class of `PlanOptions` for a search, without --plan, --passes, --offload and --freeze."""

NO_LIMITS = limit_flags()


def _require_all_axes(axes: dict[str, int], mesh: Mesh, name: str) -> None:
    """Refuse flags that give some axes of the plan's mesh but not all, which would silently remove the others.

    Raises:
        UserError: with the missing axes.
    """
    sizes = mesh.used
    if other_axes := [axis for axis in sizes if axis not in axes]:
        raise UserError(
            f"the mesh of {name} has {' x '.join(sizes)}, but {' and '.join(other_axes)} is left out; give every axis, "
            f"such as {as_flags({**sizes, **axes})}"
        )


def _base_plan(name: str | None, path: Path | None, ranks: int | None) -> Plan:
    """Return the plan that the flags change."""
    if path is not None and isinstance(read_file(path, "TOML").get("plan"), dict):  # a job
        plan = plan_settings([file_source(path)])[2]
        if plan is None:
            raise UserError(f"{path} names a strategy but has no fields of a plan; give it as --config {path}")
        return plan
    if path is not None:
        return read_plan(path)
    if name is None:
        return Plan(Mesh(dp_shard=ranks or 1))
    entry = load(name)
    if entry.plan is None:
        plans = ", ".join(plan_name for plan_name, row in STRATEGIES.items() if row.plan is not None)
        raise UserError(
            f"{name} is a program, which flags cannot change; leave out the name, or start from one of {plans}"
        )
    return entry.plan(ranks or entry.ranks)
