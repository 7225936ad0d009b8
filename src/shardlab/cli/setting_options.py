"""Flags of a training's settings, one for each field of the configuration's sections."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, cast

import tyro

from shardlab.cli.options import OptionalCount, switch_flags, switched
from shardlab.program.field_types import COUNT, field_helps, field_types
from shardlab.train.config import SECTIONS
from shardlab.train.config_sources import preset


@dataclass(frozen=True)
class SettingOptions:
    """Settings that flags give; a field is None, or False, where its flag is not given."""

    def given(self) -> dict[str, dict[str, Any]]:
        """The fields that flags give, by section.

        Raises:
            UserError: when they contradict each other.
        """
        found: dict[str, dict[str, Any]] = {}
        for section, kind in SECTIONS.items():
            types = field_types(kind)
            words = {
                name: switched(self, name) if each.words is bool else getattr(self, name)
                for name, each in types.items()
            }
            found[section] = {name: types[name].of_words(value) for name, value in words.items() if value is not None}
        return found


def _flags() -> Iterator[tuple[str, Any, Any]]:
    """List each option's name, its type for tyro, and its value if it is not given."""
    usual = preset("default").sections
    for section, kind in SECTIONS.items():
        helps = field_helps(kind)
        for name, written in field_types(kind).items():
            default = usual[section].get(name)
            shown = " ".join(map(str, cast(tuple[Any, ...], default))) if isinstance(default, tuple) else default
            hint = "" if shown is None else f"(default: {shown})"
            about = tyro.conf.arg(metavar=written.metavar, help=helps[name], help_behavior_hint=hint)
            if written.words is bool:
                yield from switch_flags(name, helps[name])
            else:
                yield name, Annotated[OptionalCount if written is COUNT else written.words | None, about], None


setting_flags: Callable[..., SettingOptions] = make_dataclass(
    "SettingFlags", _flags(), bases=(SettingOptions,), frozen=True
)
"""The options with a flag for each field."""

NO_SETTINGS = setting_flags()

Settings = Annotated[SettingOptions, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""The flags, as a command's field; their names stand alone."""
