"""YAML files: settings with their lines, anchors and merges resolved, and interpolations of OmegaConf.

PyYAML reads the values (`safe_load` resolves anchors, aliases and merges) and the lines. Unknown tags are read as plain
values, because predictions need no tags.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from functools import reduce
from typing import Any, cast

import yaml

from shardlab.common.errors import UserError
from shardlab.frameworks.settings import Setting

DEEPEST = 40
"""Largest depth of tables within tables, and of interpolations within interpolations."""


class _Loader(yaml.SafeLoader):
    """Loader of plain values, whatever their tags."""


def _plain(loader: yaml.SafeLoader, _: str, node: yaml.Node) -> Any:
    if isinstance(node, yaml.MappingNode):
        return loader.construct_mapping(node, deep=True)
    if isinstance(node, yaml.SequenceNode):
        return loader.construct_sequence(node, deep=True)
    return loader.construct_scalar(cast(yaml.ScalarNode, node))


cast(Any, _Loader).add_multi_constructor("", _plain)


def read_yaml(text: str, file: str) -> tuple[dict[str, Any], list[Setting]]:
    """Return the document of a YAML or JSON file, and its settings: "section.key" with values and lines.

    Raises:
        UserError: if it is no YAML, or no table.
    """
    try:
        document = yaml.load(text, _Loader)
        node = cast(yaml.Node | None, cast(Any, yaml).compose(text, _Loader))
    except (yaml.YAMLError, RecursionError, ValueError, TypeError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "it cannot be read"
        raise UserError(f"{file}{place} is no YAML: {problem}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} holds no table of keys; name a configuration")
    lines = dict(_lines(node))
    settings = [Setting(key, value, lines.get(key, 0)) for key, value in flat(cast(dict[Any, Any], document))]
    return cast(dict[str, Any], document), settings


def read_json(text: str, file: str) -> tuple[dict[str, Any], list[Setting]]:
    """Return the document of a JSON file, and its settings.

    Raises:
        UserError: if it is no JSON, or no table.
    """
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        location = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{file}{location} is no JSON: {error}") from None
    return read_yaml(text.replace("\t", "  "), file)  # YAML includes JSON, and has the lines


def flat(table: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table and its tables as "section.key", with their values."""
    for name, value in table.items():
        if isinstance(value, dict) and value and depth < DEEPEST:
            yield from flat(cast(dict[Any, Any], value), f"{prefix}{name}.", depth + 1)
        else:
            yield f"{prefix}{name}", value


def _lines(node: yaml.Node | None, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int]]:
    if not isinstance(node, yaml.MappingNode) or depth > DEEPEST:
        return
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if key.tag == "tag:yaml.org,2002:merge":
            merged = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for mapping in merged:
                yield from _lines(mapping, prefix, depth + 1)
            continue
        yield f"{prefix}{key.value}", key.start_mark.line + 1
        yield from _lines(value, f"{prefix}{key.value}.", depth + 1)


_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "multiply": operator.mul,
    "eval": operator.mul,
    "divide": lambda one, other: one // max(1, other),
    "add": operator.add,
}


def resolve(settings: list[Setting]) -> list[Setting]:
    """Return settings with OmegaConf's interpolations replaced: `${a.b}`, `${.b}` and `${multiply:4, ${.b}}`."""
    values = {setting.key: setting.value for setting in settings}

    def value_of(text: str, key: str, depth: int = 0) -> Any:
        if "${" not in text or depth > DEEPEST:
            return text

        def one(match: re.Match[str]) -> str:
            inner = match[1].strip()
            if operation := re.fullmatch(r"(multiply|divide|add|eval):(.*)", inner):
                numbers = re.split(r"[,*]", operation[2])
                if all(re.fullmatch(r"\s*\d+\s*", number) for number in numbers):
                    return str(reduce(_OPERATIONS[operation[1]], map(int, numbers)))
                return match[0]
            path = key.rsplit(".", 1)[0] + inner if inner.startswith(".") and "." in key else inner.lstrip(".")
            value = values.get(path, values.get(path.removeprefix("training.")))  # the section of NeMo's launcher
            return match[0] if value is None or value == text else str(value)

        inner = re.sub(r"\$\{([^${}]*)\}", one, text)
        return value_of(inner, key, depth + 1) if inner != text else text

    resolved: list[Setting] = []
    for setting in settings:
        value = value_of(setting.value, setting.key) if isinstance(setting.value, str) else setting.value
        if isinstance(value, str) and value != setting.value and re.fullmatch(r"-?\d+", value):
            value = int(value)
        resolved.append(setting._replace(value=value))
    return resolved
