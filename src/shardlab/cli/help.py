"""`--help` of a command: the options that are used most come first, and the rest follow in groups.

tyro prints the help and names a group after the field of a nested dataclass. So a command that is asked for its help is
described to tyro a second time: with the same options, but nested by group. Command lines are never parsed with this
description.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, make_dataclass
from typing import Annotated, Any, Union, cast, get_args, get_type_hints

import tyro

from shardlab.cli.model_options import ModelOptions
from shardlab.cli.picture import Pictures
from shardlab.cli.plan_options import PlanOptions
from shardlab.program.field_types import field_helps, field_types
from shardlab.train.config import SECTIONS

ONE_LIST = 12
"""Largest number of options that are shown as one list."""

MOST_USED = {
    "simulate": "ranks model cluster global_batch pp tp dp_shard schedule passes svg",
    "train": "preset data model strategy ranks steps learning_rate precision out resume",
    "verify": "ranks model layers pp tp dp_shard schedule shard_optimizer precision all",
    "eval": "data batches seq_len strategy ranks micro_batch_size pp tp dp_shard json",
    "convert": "to shard_mb model seq_len json",
    "plan": "model cluster sequence global_batch tokens_per_step precision recompute memory explain out",
    "collectives": "ranks kinds min max factor overlap plot profile verbose json",
}
"""Options of each long command that are shown first: ten at most."""

GROUPS = {
    "model": "model layers sequence seq_len",
    "plan": "strategy ranks all max_tp max_pp max_cp max_ep max_dp_shard",
    "data": "data format field batches global_batch micro_batch_size max_micro_batch_size microbatches batch_ramp "
    "tokens_per_step",
    "optimizer": "optimizer ema clip",
    "run": "preset config depth bind resume from_step steps compile recipe cluster other_machine memory costs max_ops "
    "max_seconds_per_op seconds measured grade measure",
    "logging": "",
    "output": "out print_config path each_pass force top explain save verbose json",
}
"""Groups in the order of the help, and the options in each that no table below covers."""

CLASS_GROUPS: dict[type[Any], str] = {ModelOptions: "model", PlanOptions: "plan", Pictures: "output"}
"""Group of all options of a class."""

SECTION_GROUPS = {"train": "run", "precision": "run", "saving": "output"}
"""Groups of the sections of a training's configuration, if they have other names than the sections."""


@dataclass(frozen=True)
class Option:
    """An option of a command, as tyro reads it from a field.

    Attributes:
        name: name of the field.
        kind: annotation of the field, with its help.
        default: value without the option (MISSING: the option is required).
        group: group in which it is shown (None: the option has none).
    """

    name: str
    kind: Any
    default: Any
    group: str | None

    @property
    def is_positional(self) -> bool:
        """Whether the option is given without its name."""
        return tyro.conf.Positional in get_args(self.kind)


def print_help(words: list[str], commands: Mapping[str, type[Any]], description: str) -> None:
    """Print the help that a command line with -h or --help asks for; return if one of its other words is wrong.

    Args:
        commands: every command, by name.
        description: of the program.

    Raises:
        SystemExit: after the help was printed.
    """
    if words[0] in commands:
        kinds, about = {**commands, words[0]: help_view(words[0], commands[words[0]])}, dict[str, str]()
    else:
        kinds, about = commands, {name: _first_paragraph(kind) for name, kind in commands.items()}
    choices = tuple(
        Annotated[Any, tyro.conf.subcommand(name=name, description=about.get(name), constructor=kind)]
        for name, kind in kinds.items()
    )
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            tyro.cli(
                cast(Any, Union[choices]),  # noqa: UP007
                prog="shardlab",
                description=description,
                args=words,
                return_unknown_args=True,
            )
    except SystemExit as end:
        if not end.code:
            raise


def help_view(name: str, kind: type[Any]) -> type[Any]:
    """Return a dataclass with the options of a command, nested by group, for its help alone.

    Args:
        name: name of the command, or of the last of its words.
    """
    if "what" in (hints := get_type_hints(kind, include_extras=True)):  # a command of several commands
        union, *about = get_args(hints["what"])
        views = tuple(
            Annotated[help_view(subcommand.name, command), subcommand]
            for command, subcommand in map(get_args, get_args(union))
        )
        return _dataclass_like(kind, [("what", Annotated[(Union[views], *about)], field())])  # noqa: UP007
    options = list(_options(kind))
    positional = [option for option in options if option.is_positional]
    named = {option.name: option for option in options if not option.is_positional}
    if len(named) <= ONE_LIST:
        return _dataclass_like(kind, [_field(option) for option in options])
    first = [named.pop(each) for each in MOST_USED[name].split()]
    ungrouped = [option for option in named.values() if option.group is None]
    shown = [_field(option) for option in [*positional, *first, *ungrouped]]
    for group in GROUPS:
        members = [_field(option) for option in named.values() if option.group == group]
        if members:
            nested = make_dataclass(group, members, kw_only=True)
            shown.append((f"{group}_group", Annotated[nested, tyro.conf.arg(name=group, help="")], field()))
    return _dataclass_like(kind, shown)


def _options(kind: type[Any]) -> Iterator[Option]:
    """List the options of a command; the help of `--x` mentions `--no-x`, which has no help of its own."""
    hints, helps = get_type_hints(kind, include_extras=True), dict[str, str]()
    for each in kind.__mro__:
        if each.__module__.startswith("shardlab."):
            helps = field_helps(each) | helps
    names = [each.name for each in fields(kind)]
    opposites = {f"no_{name}" for name in names}
    for each in fields(kind):
        hint = hints[each.name]
        about = get_args(hint)[1:]
        if is_dataclass(each.default):
            yield from _options(type(each.default))
        elif tyro.conf.Suppress not in about and each.name not in opposites:
            extra = dict[str, Any]()
            if each.name in helps:
                extra["help"] = helps[each.name]
            if tyro.conf.FlagCreatePairsOff in about:
                off = f"no_{each.name}"
                extra["help_behavior_hint"] = f"(--{off.replace('_', '-')} turns it off)" if off in names else ""
            shown = Annotated[(hint, tyro.conf.arg(prefix_name=False, **extra))]
            yield Option(each.name, shown, each.default, _group(kind, each.name))


def _group(kind: type[Any], name: str) -> str | None:
    for options, group in CLASS_GROUPS.items():
        if issubclass(kind, options):
            return group
    if group := next((group for group, names in GROUPS.items() if name in names.split()), None):
        return group
    section = next((section for section, config in SECTIONS.items() if name in field_types(config)), None)
    return None if section is None else SECTION_GROUPS.get(section, section)


def _field(option: Option) -> tuple[str, Any, Any]:
    return option.name, option.kind, field() if option.default is MISSING else field(default=option.default)


def _dataclass_like(kind: type[Any], shown: list[tuple[str, Any, Any]]) -> type[Any]:
    """Make a dataclass with these fields and the name and docstring of another one."""
    return make_dataclass(kind.__name__, shown, kw_only=True, namespace={"__doc__": kind.__doc__})


def _first_paragraph(kind: type[Any]) -> str:
    return " ".join((kind.__doc__ or "").partition("\n\n")[0].split())
