"""Reading what users write as TOML or JSON: a file that cannot be read, or is nested too deep, ends in a sentence."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.errors import TooDeep, UserError, why_unreadable

MOST_NESTED = 50
"""Levels of tables and lists; no file that is read needs ten."""


_LOADS: dict[str, Callable[[str], Any]] = {"TOML": tomllib.loads, "JSON": json.loads}


def read_file(path: Path, form: Literal["TOML", "JSON"]) -> Any:
    """What a user's file says.

    Raises:
        UserError: the file cannot be read, is no text, is nested too deep, or is not of that form.
    """
    try:
        return parsed(_LOADS[form], path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, TooDeep) as error:
        raise UserError(f"{path} cannot be read: {why_unreadable(error)}") from None
    except ValueError as error:
        raise UserError(f"{path} is not {form}: {error}") from None


def parsed(loads: Callable[[str], Any], text: str) -> Any:
    """What a parser makes of a text.

    Raises:
        TooDeep: if it is nested deeper than `MOST_NESTED` levels, on which parsers and printing would end in an error.
        ValueError: what the parser itself raises.
    """
    try:
        data = loads(text)
    except RecursionError:
        raise TooDeep(MOST_NESTED) from None
    level, depth = [data], 0
    while level:
        depth += 1
        if depth > MOST_NESTED:
            raise TooDeep(MOST_NESTED)
        level = [inner for outer in level for inner in _inside(outer)]
    return data


def _inside(value: Any) -> list[Any]:
    """The tables and lists right inside a value."""
    inner: list[Any] = []
    if isinstance(value, dict):
        inner = list(cast(dict[str, Any], value).values())
    elif isinstance(value, list):
        inner = cast(list[Any], value)
    return [each for each in inner if isinstance(each, dict | list)]
