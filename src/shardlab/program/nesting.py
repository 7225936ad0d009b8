"""Reading what users write as TOML or JSON: a text nested thousands of levels deep ends in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from shardlab.errors import TooDeep

MOST_NESTED = 50
"""Levels of tables and lists; no file that is read needs ten."""


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
