"""Recipes: how a training framework runs a step, as far as time and memory depend on it.

A framework may run an operation as several kernels, each of which goes through memory; keep more, or less, for the
backward pass than our own executor does; hold memory beyond tensors; or let communication run beside compute that, in
the program, waits for it. Every recipe is a TOML file in `predict/recipes`, or a user's own:

    base = "megatron-core"        # all that is not said here (default: plain fused kernels, nothing beyond tensors)
    source = "where its choices are described"

    [kernels]
    attention = "cudnn"           # a choice, described by the recipe's source

    [memory.reserved]             # a figure with a source of its own, or fitted to runs
    value = 1.24
    fitted_to = "bigscience's memory by nvidia-smi"
    runs = ["bloom-prequel-*"]       # their ids in a file of published runs
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, cast, get_type_hints

from shardlab.errors import UserError, nearest, unknown
from shardlab.hardware.figure import Figure
from shardlab.predict.recipe_groups import Defaults, Kernels, MemoryUse, Overlap
from shardlab.predict.recipe_values import read_table, read_value
from shardlab.program.files import packaged
from shardlab.program.nesting import read_file

FOLDER = "predict/recipes"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a framework runs a step.

    Attributes:
        name: how it is asked for.
        source: where its choices are described.
        kernels, memory, overlap, defaults: its figures.
        figures: by group and field, as in "memory.reserved", each figure that its files give.
    """

    name: str = ""
    source: str = ""
    kernels: Kernels = field(default_factory=Kernels)
    memory: MemoryUse = field(default_factory=MemoryUse)
    overlap: Overlap = field(default_factory=Overlap)
    defaults: Defaults = field(default_factory=Defaults)
    figures: Mapping[str, Figure] = field(default_factory=dict[str, Figure], compare=False)


GROUPS = {"kernels": Kernels, "memory": MemoryUse, "overlap": Overlap, "defaults": Defaults}


@cache
def recipes() -> Mapping[str, Recipe]:
    """Every built-in recipe by name, Shardlab's own first, those that build on it below their base."""
    found = {name: find_recipe(name) for name in _names()}
    return dict(sorted(found.items(), key=lambda item: item[0] != "shardlab"))


def find_recipe(name: str, inside: tuple[Path, ...] = ()) -> Recipe:
    """The built-in recipe of that name, in any case of letters, or the one in a TOML file.

    Args:
        inside: files that are being read, each of which is the base of the one before; a file that the last of them
            names lies beside it, unless its path begins at the root.

    Raises:
        UserError: there is none, and the nearest name is suggested; or the file says what a recipe cannot.
    """
    if name.endswith(".toml"):
        path = inside[-1].parent / name if inside else Path(name)
        files = (*inside, path)
        if path.resolve() in {each.resolve() for each in inside}:
            raise UserError(f"{' builds on '.join(map(str, files))}, which is being read; give another base")
        return _made(path.stem, str(path), read_file(path, "TOML"), files)
    return _packaged(name.strip().lower())


def _names() -> list[str]:
    files = (resources.files("shardlab") / FOLDER).iterdir()
    return sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml"))


@cache
def _packaged(name: str) -> Recipe:
    if name not in _names():
        raise unknown("recipe", name, _names(), " and files that end in .toml")
    return _made(name, name, packaged(f"{FOLDER}/{name}.toml"))


def _made(name: str, where: str, written: Any, files: tuple[Path, ...] = ()) -> Recipe:
    """The recipe of a file, with all that its base says and it does not."""
    known = {"base", "source", *GROUPS}
    table = read_table(written, where)
    if wrong := next((key for key in table if key not in known), None):
        raise UserError(f"{where}: a recipe has no {wrong!r}; {nearest(wrong, known)}")
    source = table.get("source")
    if not isinstance(source, str) or not source:
        raise UserError(f"{where} gives no source; say in quotes where the framework's way is described")
    base = find_recipe(str(table["base"]), files) if "base" in table else Recipe()
    figures = dict(base.figures)
    for group, kind in GROUPS.items():
        hints = get_type_hints(kind)
        for key, value in read_table(table.get(group, {}), f"{where}: {group}").items():
            full = f"{group}.{key}"
            if key not in hints:
                raise UserError(f"{where}: {group} has no {key!r}; {nearest(key, hints)}")
            figures[full] = _figure(f"{where}: {full}", hints[key], value, source, figures.get(full))
    groups = {
        group: kind(**{key.split(".")[1]: each.value for key, each in figures.items() if key.split(".")[0] == group})
        for group, kind in GROUPS.items()
    }
    return Recipe(name=name, source=source, figures=figures, **cast(Any, groups))


def _figure(where: str, hint: Any, written: Any, source: str, base: Figure | None) -> Figure:
    """A figure as a file gives it: its value alone, or a table that has it."""
    table: dict[str, Any] = {"value": written}
    if isinstance(written, dict) and "value" in written:
        table = cast(dict[str, Any], written)
    hints = get_type_hints(Figure)
    if wrong := next((key for key in table if key not in hints), None):
        raise UserError(f"{where}: a figure has no {wrong!r}; {nearest(wrong, hints)}")
    told: dict[str, Any] = {"source": source}
    told |= {key: read_value(f"{where}.{key}", hints[key], each) for key, each in table.items() if key != "value"}
    return Figure(read_value(where, hint, table["value"], base and base.value), **told)


OWN = find_recipe("shardlab")
"""Shardlab's own executor."""
