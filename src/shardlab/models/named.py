"""Models by name: an architecture, a published model, a class in a Python file, or a TOML file.

`find_model` is the entry point. The functions from `index_of` to `weights_at` name the files of a model's weights: one
file, or several files and their index, as in transformers.
"""

from __future__ import annotations

import copyreg
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeGuard

from shardlab.common.errors import UserError, naming, suggest_name, unknown_name
from shardlab.common.fields import field_hints, read_fields
from shardlab.common.files import load_table, read_file
from shardlab.common.user_code import file_and_name, find_member, load_module, reporting_errors_of
from shardlab.models.architectures import GPT, MLP, Llama, Mixtral, MoE
from shardlab.models.from_config import is_config, model_from_config
from shardlab.models.layer import want_carried, want_sound
from shardlab.models.model import Blocks

ARCHITECTURES: dict[str, type[Blocks]] = {"gpt": GPT, "mlp": MLP, "moe": MoE, "llama": Llama, "mixtral": Mixtral}
"""Architectures by name. As the name of a model, each stands for a very small model, for experiments."""

FROM_FILES: dict[type[Blocks], str] = {}
"""Names of the architectures that were found in users' files."""


def find_model(name: str) -> Blocks:
    """Return the model with a name, ignoring case, or of a file: path/to/file.py:NAME, path/to/model.toml, a
    config.json of transformers, or a folder that has one.

    >>> find_model("gpt2").parameter_count
    124439808

    In a Python file, NAME is a subclass of `Blocks`, or an instance of one. A TOML file has the name of a model in
    `model`, and the fields that it changes:

        model = "llama3-8b"
        layers = 4

    Raises:
        UserError: if there is no such name or file, if the object in a Python file is not a model, or if the model does
            not have the fields of a TOML file.
    """
    if name.endswith(".toml"):
        return _from_toml(Path(name))
    path, kind = file_and_name(name)
    if path is not None:
        return _from_python(path, kind)
    published, low = sources(), name.lower()
    if low in ARCHITECTURES:
        return ARCHITECTURES[low]()
    if low in published:
        values = {field: value for field, value in _table()[low].items() if field != "source"}
        return with_written(find_model(values.pop("model")), values, low)
    if is_config_file(name):
        return model_from_config(Path(name))
    names = [*ARCHITECTURES, *published]
    raise unknown_name("model", name, names, ", path/to/file.py:NAME and files that end in .toml or .json")


def is_config_file(name: str) -> bool:
    """Return whether a name stands for a config.json, or for a folder of transformers, and not for another model."""
    return name.lower() not in {*ARCHITECTURES, *sources()} and is_config(name)


def unsized(name: str, model: Blocks) -> set[str]:
    """Return the fields of a model whose values are only defaults.

    For an architecture these are all fields, for a class in a file the fields that it does not set itself, and for a
    published model none.
    """
    kind = type(model)
    if name.lower() not in ARCHITECTURES and not FROM_FILES.get(kind, "").endswith(f":{kind.__name__}"):
        return set()
    set_fields = {
        field for class_ in kind.__mro__ if not class_.__module__.startswith("shardlab.") for field in vars(class_)
    }
    return {field.name for field in fields(model)} - set_fields


def name_of(kind: type[Blocks]) -> str:
    """Return a name with which `find_model` finds an architecture."""
    return FROM_FILES.get(kind, kind.__name__.lower())


def sources() -> dict[str, str]:
    """Return the names of all published models, each with the source of its sizes."""
    return {name: row["source"] for name, row in _table().items()}


def with_fields(model: Blocks, changes: Mapping[str, Any], source: str) -> Blocks:
    """Return a model with some fields changed. Error messages begin with `source`.

    Raises:
        UserError: for a field that the model does not have, or for values that contradict each other.
    """
    _require_fields(model, changes, source)
    return replace(model, **changes)


def with_written(model: Blocks, values: Mapping[str, Any], source: str) -> Blocks:
    """Return a model with some fields changed to values of a file, where infinity means None.

    Raises:
        UserError: for a field that the model does not have, for a value of another type, or for values that contradict
            each other.
    """
    _require_fields(model, values, source)
    changes = {name: None if value == math.inf else value for name, value in values.items()}
    return replace(model, **read_fields(field_hints(type(model)), changes, source))


def _require_fields(model: Blocks, changes: Iterable[str], source: str) -> None:
    field_names = [field.name for field in fields(model)]
    for name in changes:
        if name not in field_names:
            raise UserError(
                f"{source}: a model of this kind ({type(model).__name__}) has no {name}; "
                f"{suggest_name(name, field_names)}"
            )


ENDING = ".safetensors"
SINGLE = "model.safetensors"

SHARD_BYTES = 5 * 10**9
"""Largest size of a file in bytes, unless a single tensor is larger, as in transformers."""


def index_of(single: Path) -> Path:
    """Return the path of the index that replaces a file of weights if there are several."""
    return single.with_name(single.name + ".index.json")


def shards_of(sizes: Iterable[int], single: str, shard_bytes: int) -> list[str]:
    """Return, for each tensor, the name of the file that stores it: one file for all, or several numbered ones.

    `sizes` are the tensors' bytes, in order.
    """
    numbers: list[int] = []
    number = filled = 0
    for size in sizes:
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    stem, count = single.removesuffix(ENDING), number + 1
    return [single if count == 1 else f"{stem}-{shard + 1:05}-of-{count:05}{ENDING}" for shard in numbers]


def index_text(files: Mapping[str, str], total: int) -> str:
    """Return the text of the index for several files of weights: the file of each tensor.

    Args:
        files: the file of each tensor.
        total: bytes of all tensors.
    """
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(files)}, indent=2) + "\n"


def weights_at(single: Path) -> Path | None:
    """Return the path of a file of weights, or of the index of several files; None if there is neither.

    If both exist, the result is the single file, as in transformers.
    """
    return next((path for path in (single, index_of(single)) if path.is_file()), None)


def _from_python(path: Path, name: str) -> Blocks:
    """Return a model of a user's file. A model of one block is built as a test, so that mistakes are reported here."""
    name, member = find_member(load_module(path), path, name, ("model", "models"), _is_own)
    if not _is_model(member):
        raise UserError(
            f"{name} in {path} is not a model; write it as a subclass of shardlab.models.Blocks, or as an object of one"
        )
    if isinstance(member, type) and (missing := sorted(member.__abstractmethods__)):
        raise UserError(f"{name} in {path} does not say its {', '.join(missing)}; define that as GPT does")
    if isinstance(member, type) and (
        no_default := [field.name for field in fields(member) if field.default is MISSING]
    ):
        raise UserError(f"{name} in {path} has no default for {', '.join(no_default)}; every field of a model has one")
    with reporting_errors_of(path):
        model = member() if isinstance(member, type) else member
        one = replace(model, layers=1)
        want_sound(one.steps)
        want_carried(replace(model, layers=2).runs)
        one.run(0).kernels(1, one.seq_len)
        one.sizes(1, 4)
    kind = type(model)
    if kind not in ARCHITECTURES.values():
        FROM_FILES[kind] = f"{path}:{name}"
        copyreg.pickle(kind, _by_name)  # other processes cannot import the class
    return model


def _is_model(member: object) -> TypeGuard[Blocks | type[Blocks]]:
    return isinstance(member, Blocks) or (
        isinstance(member, type) and issubclass(member, Blocks) and member is not Blocks
    )


def _is_own(member: object) -> bool:
    """Return whether an object is a model, or a class of models, other than the built-in architectures."""
    return _is_model(member) and member not in ARCHITECTURES.values()


def _by_name(model: Blocks) -> tuple[Any, ...]:
    """Return the function and the arguments with which another process rebuilds a model of a file."""
    return _rebuild, (name_of(type(model)), {field.name: getattr(model, field.name) for field in fields(model)})


def _rebuild(name: str, values: Mapping[str, Any]) -> Blocks:
    return replace(find_model(name), **values)


def _from_toml(path: Path) -> Blocks:
    table = read_file(path, "TOML")
    base, _ = table.pop("model", None), table.pop("source", None)
    if not isinstance(base, str) or base.endswith(".toml"):
        raise UserError(
            f'{path} does not say which model it changes; write, for example, model = "llama", and then its fields'
        )
    with naming(path):
        return with_written(find_model(base), table, str(path))


@cache
def _table() -> dict[str, dict[str, Any]]:
    """Return the table of published models."""
    return load_table("models/named.toml")
