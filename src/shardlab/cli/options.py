"""Kinds of option that several commands share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, cast, get_type_hints

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from shardlab.program import UserError
from shardlab.program.bounds import MAX_FOLDED, MAX_OPS, MAX_SECONDS


def _count(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"{word!r} is not a whole number; give 1 or more.") from None


def check_counts(command: object) -> None:
    """Refuse a count of less than 1 among a command's options: tyro would take eight lines to say so.

    Raises:
        UserError: with the option.
    """
    hints = get_type_hints(type(command), include_extras=True)
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        if is_dataclass(value):
            check_counts(value)
            continue
        is_count = any(each is _COUNT for each in getattr(hints[field.name], "__metadata__", ()))
        if is_count and value is not None and value < 1:
            raise UserError(f"--{field.name.replace('_', '-')}: {value} is too few; give 1 or more")


def option_names(command: object) -> list[str]:
    """Names of a command's fields, each of which is an option; those of a group of options stand alone."""
    names: list[str] = []
    for field in fields(cast(Any, command)):
        value = getattr(command, field.name)
        names += option_names(value) if is_dataclass(value) else [field.name]
    return names


def one_word(metavar: str, read: Callable[[str], Any], kind: type) -> PrimitiveConstructorSpec[Any]:
    """An option of one word, which `read` makes a value of such a kind; what its ValueError says is printed."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda words: read(words[0]),
        is_instance=lambda value: value is None or isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


_COUNT = one_word("N", _count, int)

Count = Annotated[int, _COUNT]
"""1 or more."""

OptionalCount = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="")]
"""1 or more, or not given."""

Ranks = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: the plan's, or 4, or 1)")]
"""1 or more; without it as many as the plan has, or 4, or 1 for a strategy of one device."""

Layers = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: 4, or one for each stage)")]
"""1 or more; without it 4, or one for each stage if a pipeline has more stages."""

MaxOps = Annotated[
    int | None,
    _COUNT,
    tyro.conf.arg(help_behavior_hint=f"(default: {MAX_OPS:,}; {MAX_FOLDED:,} if identical ranks are folded)"),
]
"""The most ops that are traced; a module's `main` sees to it (see `shardlab.program.bounds`)."""

MaxSeconds = Annotated[float | None, tyro.conf.arg(metavar="SECONDS", help_behavior_hint=f"(default: {MAX_SECONDS:g})")]
"""The most CPU time until a user's next op; a module's `main` sees to it (see `shardlab.program.bounds`)."""

Norm = Annotated[float | None, tyro.conf.arg(metavar="NORM", help_behavior_hint="")]
"""The largest norm of a gradient, or none."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""`--flag`, without a `--no-flag`."""


def switch_flags(name: str, about: str) -> Iterator[tuple[str, Any, bool]]:
    """The two flags of a switch, `--name` and `--no-name`: the name of each, its type for tyro, and False."""
    yield name, Annotated[Flag, tyro.conf.arg(help=about)], False
    off = f"Turn --{name.replace('_', '-')} off, even if the preset or config file turns it on."
    yield f"no_{name}", Annotated[Flag, tyro.conf.arg(help=off)], False


def switched(options: object, name: str, opposite: str | None = None) -> bool | None:
    """What the two flags of a switch say; None: neither is given.

    Args:
        opposite: the name of the one that turns it off (None: `no_` and its name).

    Raises:
        UserError: both are given.
    """
    opposite = opposite or f"no_{name}"
    on, off = getattr(options, name), getattr(options, opposite)
    if on and off:
        flags = " and ".join(f"--{each.replace('_', '-')}" for each in (name, opposite))
        raise UserError(f"both {flags} were given; give one of them")
    return on if on or off else None


NewFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
"""A file to be written."""

Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""A name, or none."""

StrategyName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="")]
"""A built-in name or `path/to/file.py:function`; none for a plan by flags."""
