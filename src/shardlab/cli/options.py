"""The kinds of option that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec


def _count(words: list[str]) -> int:
    try:
        count = int(words[0])
    except ValueError:
        raise ValueError(f"{words[0]!r} is not a whole number; give 1 or more.") from None
    if count < 1:
        raise ValueError(f"{count} is too few; give 1 or more.")
    return count


def _is_count(value: Any) -> bool:
    return value is None or isinstance(value, int)


def _shown(value: int | None) -> list[str]:
    return [str(value)]


_COUNT = PrimitiveConstructorSpec(
    nargs=1, metavar="N", instance_from_str=_count, is_instance=_is_count, str_from_instance=_shown
)

Count = Annotated[int, _COUNT]
"""1 or more."""

OptionalCount = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="")]
"""1 or more, or not given."""

Ranks = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: the plan's, or 4, or 1)")]
"""1 or more; without it as many as the plan has, or 4, or 1 for a strategy of one device."""

Layers = Annotated[int | None, _COUNT, tyro.conf.arg(help_behavior_hint="(default: 4, or one for each stage)")]
"""1 or more; without it 4, or one for each stage if a pipeline has more stages."""

Norm = Annotated[float | None, tyro.conf.arg(metavar="NORM", help_behavior_hint="")]
"""The largest norm of a gradient, or none."""

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]
"""`--flag`, without a `--no-flag`."""

NewFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="")]
"""A file to be written."""

Name = Annotated[str | None, tyro.conf.arg(metavar="NAME", help_behavior_hint="")]
"""A name, or none."""

StrategyName = Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="STRATEGY", help_behavior_hint="")]
"""A built-in name or `path/to/file.py:function`; none for a plan by flags."""
