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
        what = getattr(error, "problem", None) or "it cannot be read"
        raise UserError(f"{file}{place} is no YAML: {what}") from None
    if not isinstance(document, dict):
        raise UserError(f"{file} holds no table of keys; name a configuration")
    lines = dict(_lines(node))
    found = [Setting(key, value, lines.get(key, 0)) for key, value in flat(cast(dict[Any, Any], document))]
    return cast(dict[str, Any], document), found


def read_json(text: str, file: str) -> tuple[dict[str, Any], list[Setting]]:
    """Return the document of a JSON file, and its settings.

    Raises:
        UserError: if it is no JSON, or no table.
    """
    try:
        json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        where = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise UserError(f"{file}{where} is no JSON: {error}") from None
    return read_yaml(text.replace("\t", "  "), file)  # YAML includes JSON, and has the lines


def flat(written: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a table and its tables as "section.key", with their values."""
    for name, value in written.items():
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
            for each in merged:
                yield from _lines(each, prefix, depth + 1)
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
    values = {each.key: each.value for each in settings}

    def value_of(text: str, key: str, depth: int = 0) -> Any:
        if "${" not in text or depth > DEEPEST:
            return text

        def one(found: re.Match[str]) -> str:
            inner = found[1].strip()
            if operation := re.fullmatch(r"(multiply|divide|add|eval):(.*)", inner):
                numbers = re.split(r"[,*]", operation[2])
                if all(re.fullmatch(r"\s*\d+\s*", number) for number in numbers):
                    return str(reduce(_OPERATIONS[operation[1]], map(int, numbers)))
                return found[0]
            path = key.rsplit(".", 1)[0] + inner if inner.startswith(".") and "." in key else inner.lstrip(".")
            known = values.get(path, values.get(path.removeprefix("training.")))  # the section of NeMo's launcher
            return found[0] if known is None or known == text else str(known)

        inner = re.sub(r"\$\{([^${}]*)\}", one, text)
        return value_of(inner, key, depth + 1) if inner != text else text

    found: list[Setting] = []
    for each in settings:
        value = value_of(each.value, each.key) if isinstance(each.value, str) else each.value
        if isinstance(value, str) and value != each.value and re.fullmatch(r"-?\d+", value):
            value = int(value)
        found.append(each._replace(value=value))
    return found
