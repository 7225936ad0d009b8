"""Values of a recipe's figures, as its TOML file writes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from shardlab.errors import UserError, nearest
from shardlab.models.kept import AUTOGRAD, SavedActivations

_WORDS = {
    bool: "true or false",
    int: "a whole number, 0 or more",
    float: "a number, 0 or more",
    str: "a text in quotes",
}


def read_value(where: str, hint: Any, written: Any, base: Any = None) -> Any:
    """A figure's value.

    Args:
        where: the file and the figure, for a message.
        hint: the type of its field.
        base: the value in the recipe's base; of a table, what is not written is as there.

    Raises:
        UserError: it is of another type.
    """
    if hint is SavedActivations:
        hints, table = get_type_hints(SavedActivations), read_table(written, where)
        if wrong := next((key for key in table if key not in hints), None):
            raise UserError(f"{where} has no {wrong!r}; {nearest(wrong, hints)}")
        read = {key: read_value(f"{where}.{key}", hints[key], value) for key, value in table.items()}
        return replace(base or AUTOGRAD, **read)
    if get_origin(hint) is Mapping:
        each = get_args(hint)[1]
        read = {key: read_value(f"{where}.{key}", each, value) for key, value in read_table(written, where).items()}
        return cast(dict[str, Any], base or {}) | read
    if hint == tuple[float, float]:
        return _ratios(where, written)
    if get_origin(hint) is tuple:
        if not isinstance(written, list) or not all(isinstance(each, str) for each in cast(list[Any], written)):
            raise UserError(f"{where} is {written!r}; give a list of texts in quotes")
        return tuple(cast(list[str], written))
    if get_origin(hint) is Literal:
        if written not in get_args(hint):
            raise UserError(f"{where} is {written!r}; give one of {', '.join(get_args(hint))}")
        return written
    kinds = get_args(hint) or (hint,)
    kind = next(kind for kind in kinds if kind in _WORDS)
    fits = isinstance(written, (int, float) if kind is float else kind) and isinstance(written, bool) == (kind is bool)
    if not fits or (isinstance(written, int | float) and not 0 <= written < math.inf):
        raise UserError(f"{where} is {written!r}; give {_WORDS[kind]}")
    return written


def read_table(written: Any, where: str) -> dict[str, Any]:
    """What a file says in a table.

    Raises:
        UserError: it is none.
    """
    if not isinstance(written, dict):
        raise UserError(f"{where} is {written!r}; give a table")
    return cast(dict[str, Any], written)


def _ratios(where: str, written: Any) -> tuple[float, float]:
    """`[1, "3.5/4"]`: bytes moved over those of one fused kernel, forward and backward."""
    try:
        if not isinstance(written, list):
            raise TypeError
        forward, backward = (_ratio(each) for each in cast(list[str | float], written))
        if not all(0 <= ratio < math.inf for ratio in (forward, backward)):
            raise ValueError
    except (TypeError, ValueError, ZeroDivisionError):
        raise UserError(f'{where} is {written!r}; give two numbers or ratios, such as [1, "3.5/4"]') from None
    return forward, backward


def _ratio(written: str | float) -> float:
    above, _, below = str(written).partition("/")
    return float(above) / float(below or 1)
