"""A published run as its file gives it: typed fields, of which some may be absent."""

from __future__ import annotations

import math
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, TypeVar, cast

T = TypeVar("T")


class Incomplete(Exception):
    """A run does not say enough to be predicted; the message says what is missing."""


class Unknown(Incomplete):
    """A run names a device, a network, a framework or the like that is unknown here; the message says which."""


def limited(most: int, *, least: int = 1, wanted: bool = False) -> Any:
    """A field that is a whole number of `least` to `most`; what is replayed op by op has a limit."""
    limits = {"least": least, "most": most}
    return field(metadata=limits) if wanted else field(default=None, metadata=limits)


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """A model's sizes, and its activation function."""

    layers: int = limited(4096, wanted=True)
    hidden: int
    heads: int
    seq_len: int
    kv_heads: int | None = None
    ffn_hidden: int | None = None
    ffn_type: str | None = None
    vocab: int | None = None
    tied_embeddings: bool | None = None


@dataclass(frozen=True, kw_only=True)
class HardwareRecord:
    """Devices and network.

    Attributes:
        device: by its name in `shardlab.hardware.devices`.
        network: the link between nodes, by its name in `shardlab.hardware.links`.
        nics: how many of these a node has.
        gpu, interconnect: texts, which are read for names where these are absent.
    """

    device: str | None = None
    gpus: int = limited(32768, wanted=True)
    gpus_per_node: int | None = None
    network: str | None = None
    nics: int | None = limited(1024)
    gpu: str | None = None
    interconnect: str | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelismRecord:
    """How the model was laid over the GPUs."""

    tp: int = limited(32768, wanted=True)
    pp: int = limited(4096, wanted=True)
    dp: int | None = limited(32768)
    cp: int | None = limited(32768)
    zero_stage: int | None = limited(3, least=0)
    interleave_v: int | None = limited(4096)
    schedule: str | None = None
    sequence_parallel: bool | None = None
    reshard_after: str | None = None
    first_last_stage_one_layer_less: bool = False


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """Sequences of a step and of a microbatch."""

    global_sequences: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """The parameters of a model of which nothing else is told, and the ranks that share them."""

    params: float
    dp: int = limited(32768, wanted=True)
    zero_stage: int = field(default=0, metadata={"least": 0, "most": 3})


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run of a file, but for what it measured.

    Attributes:
        framework: the recipe that describes it, by name.
        precision: dtype of products of matrices: fp32, bf16, fp16 or fp8.
        gradients: dtype in which gradients are reduced: fp32, or half of that where it says anything else.
    """

    id: str
    source: str
    framework: str | None = None
    model: ModelRecord
    hardware: HardwareRecord
    parallelism: ParallelismRecord
    batch: BatchRecord
    precision: str | None = None
    gradients: str | None = None
    recompute: str | None = None


def record_of(row: dict[str, Any]) -> RunRecord:
    """The record of a file's row.

    Raises:
        Incomplete: it lacks a field that a prediction needs, or has something else where a number must stand.
    """
    sections = {
        "model": made(ModelRecord, section(row, "model")),
        "hardware": made(HardwareRecord, section(row, "hardware")),
        "parallelism": made(ParallelismRecord, section(row, "parallelism")),
        "batch": made(BatchRecord, section(row, "batch")),
    }
    return made(RunRecord, {"source": ""} | {name: row[name] for name in row if row[name] is not None} | sections)


def section(row: dict[str, Any], name: str) -> dict[str, Any]:
    """One of a row's objects; an absent one is empty."""
    value = row.get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def made(kind: type[T], written: dict[str, Any]) -> T:
    """A record of what is written; `8`, `8.0` and `"8"` are all 8, and null is as if it were absent.

    Raises:
        Incomplete: a field is absent that the record needs, or is no number where one must stand.
    """
    known: list[Field[Any]] = list(fields(cast(Any, kind)))
    values = {each.name: _read(each, written[each.name]) for each in known if written.get(each.name) is not None}
    missing = [each.name for each in known if each.default is MISSING and each.name not in values]
    if missing:
        raise Incomplete(f"does not say {', '.join(missing).replace('_', ' ')}")
    return kind(**values)


def _read(each: Field[Any], value: Any) -> Any:
    """A field's value in the field's type."""
    kind = str(each.type).split()[0]
    if kind == "bool":
        return bool(value)
    if kind == "str":
        return str(value)
    if kind not in ("int", "float"):
        return value
    found, name = _finite(value), each.name.replace("_", " ")
    least, most = each.metadata.get("least", 1), each.metadata.get("most", 10**12)
    if found is None or found < least or (kind == "int" and found != int(found)):
        raise Incomplete(f"gives {value!r} as {name}, which is no whole number of {least} or more")
    if found > most:
        raise Incomplete(f"gives {value!r} as {name}, which is more than {most}")
    return int(found) if kind == "int" else found


def _finite(value: Any) -> float | None:
    """A number, written as such or in quotes; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) else None


def number(value: Any) -> float | None:
    """A positive number, written as such or in quotes; None for anything else."""
    found = _finite(value)
    return found if found is not None and found > 0 else None
