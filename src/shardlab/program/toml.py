"""Writing TOML: tables of words, numbers, truth values and lists of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, cast


def as_toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Write tables as TOML; a value that is None is left out.

    >>> print(as_toml({"plan": {"mesh": {"pp": 2}, "schedule": "1f1b", "stages_per_rank": None}}), end="")
    [plan]
    mesh = { pp = 2 }
    schedule = "1f1b"
    """
    texts = [f"[{name}]\n{''.join(_lines(table))}" for name, table in tables.items()]
    return "\n".join(texts)


def _lines(table: Mapping[str, Any]) -> list[str]:
    return [f"{_key(name)} = {toml_value(value)}\n" for name, value in table.items() if value is not None]


def toml_value(value: Any) -> str:
    """A value as TOML has it.

    >>> toml_value(["a\\"b", 2e-3, True, float("inf")])
    '["a\\\\"b", 0.002, true, inf]'
    """
    if isinstance(value, Mapping):
        inner = [f"{_key(name)} = {toml_value(each)}" for name, each in cast(Mapping[str, Any], value).items()]
        return f"{{ {', '.join(inner)} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, cast(list[Any], value)))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    assert isinstance(value, int | float), value
    return repr(value)


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else toml_value(name)
