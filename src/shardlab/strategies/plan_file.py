"""A plan written down in a TOML file."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, cast

from shardlab.errors import TooDeep, nearest, why_unreadable
from shardlab.program import AXES, Mesh, UserError
from shardlab.program.nesting import parsed
from shardlab.strategies.plan import Plan


def read_plan(path: Path) -> Plan:
    """The plan in a file: the fields of `Plan`, and a table `mesh` of its axes' sizes.

    Raises:
        UserError: for a file that cannot be read, a field that a plan does not have, or a value that does not fit.
    """
    try:
        written = parsed(tomllib.loads, path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not TOML: {error}") from None
    _check_names(path, "field", written, [field.name for field in fields(Plan)])
    mesh = written.pop("mesh", {})
    if not isinstance(mesh, dict):
        raise UserError(f"{path}: mesh is {mesh!r}; write a table, as in mesh = {{ pp = 2, dp_shard = 2 }}")
    sizes = cast(dict[str, Any], mesh)
    _check_names(path, "axis", sizes, AXES)
    for name, value in (*written.items(), *sizes.items()):
        _check_value(path, name, value)
    values: dict[str, Any] = {
        name: tuple(cast(list[Any], v)) if isinstance(v, list) else v for name, v in written.items()
    }
    try:
        return Plan(mesh=Mesh(**sizes), **values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _check_names(path: Path, what: str, written: Mapping[str, Any], known: Iterable[str]) -> None:
    known = list(known)
    for name in written:
        if name not in known:
            raise UserError(f"{path}: a plan has no {what} {name!r}; {nearest(name, known)}")


def _check_value(path: Path, name: str, value: Any) -> None:
    """Whether a value is of the kind that its field wants."""
    if name in AXES or name == "stages_per_rank":
        good, wanted = isinstance(value, int) and not isinstance(value, bool), "a whole number"
    elif name == "sequence_parallel":
        good, wanted = isinstance(value, bool), "true or false"
    elif name == "layers_per_stage" or (name == "recompute" and isinstance(value, list)):
        good, wanted = isinstance(value, list) and all(type(v) is int for v in cast(list[Any], value)), "numbers"
    elif name.startswith("shard_") or name == "reduce_each":
        good, wanted = isinstance(value, list), "a list of axes, such as ['dp_shard']"
    else:
        good, wanted = isinstance(value, str), "a word in quotes"
    if not good:
        raise UserError(f"{path}: {name} is {value!r}; give {wanted}")
