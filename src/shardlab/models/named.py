"""Finding a model by what a user calls it: an architecture, a published model, or a TOML file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from shardlab.errors import UserError, nearest, unknown
from shardlab.models.blocks import Blocks
from shardlab.models.gpt import GPT
from shardlab.models.llama import Llama, Mixtral
from shardlab.models.mlp import MLP
from shardlab.models.moe import MoE
from shardlab.program.files import packaged
from shardlab.program.nesting import read_file

ARCHITECTURES: dict[str, type[Blocks]] = {"gpt": GPT, "mlp": MLP, "moe": MoE, "llama": Llama, "mixtral": Mixtral}
"""Kinds of model by name; alone, such a name is the smallest thing of its kind, for trying out."""

WANTED = {"int": (int, "a whole number"), "float": ((int, float), "a number"), "bool": (bool, "true or false")}
"""What a field's value in a file must be, by the first word of the field's type; any other one is a word."""


def find_model(name: str) -> Blocks:
    """The model called `name`, in any case; or the one that the file path/to/model.toml describes.

    >>> find_model("gpt2").parameter_count
    124439808

    A file holds the fields of a model, and in `model` the name of the one whose fields it changes:

        model = "llama3-8b"
        layers = 4

    Raises:
        UserError: when there is no such name or file, or a file's fields are not the model's.
    """
    if name.endswith(".toml"):
        return _from_file(Path(name))
    published, low = sources(), name.lower()
    if low in ARCHITECTURES:
        return ARCHITECTURES[low]()
    if low in published:
        written = {field: value for field, value in _table()[low].items() if field != "source"}
        return _changed(ARCHITECTURES[written.pop("model")](), written, low)
    known = [*ARCHITECTURES, *published]
    raise unknown("model", name, known, ", and files that end in .toml")


def sources() -> dict[str, str]:
    """Every published model's name, and where its sizes are published."""
    return {name: written["source"] for name, written in _table().items()}


def with_fields(model: Blocks, changes: Mapping[str, Any], said: str) -> Blocks:
    """The model with some fields changed; `said` names it.

    Raises:
        UserError: for a field that it does not have, or values that do not go together.
    """
    known = [field.name for field in fields(model)]
    for name in changes:
        if name not in known:
            raise UserError(
                f"{said}: a model of this kind ({type(model).__name__}) has no {name}; {nearest(name, known)}"
            )
    return replace(model, **changes)


def _changed(model: Blocks, written: Mapping[str, Any], said: str) -> Blocks:
    """`with_fields`, where values may be of any type."""
    types = {field.name: str(field.type).split()[0] for field in fields(model)}
    for name, value in written.items():
        kind, wanted = WANTED.get(types.get(name, ""), (object if name not in types else str, "a word in quotes"))
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool and name in types):
            raise UserError(f"{said}: {name} is {value!r}; give {wanted}")
    return with_fields(model, written, said)


def _from_file(path: Path) -> Blocks:
    written = read_file(path, "TOML")
    base, _ = written.pop("model", None), written.pop("source", None)
    if not isinstance(base, str) or base.endswith(".toml"):
        raise UserError(
            f'{path} does not say which model it changes; write, for example, model = "llama", and then its fields'
        )
    try:
        return _changed(find_model(base), written, str(path))
    except UserError as error:
        said = str(error)
        raise UserError(said if said.startswith(str(path)) else f"{path}: {said}") from None


@cache
def _table() -> dict[str, dict[str, Any]]:
    """The published models, as they are written down."""
    return packaged("models/named.toml")
