"""Records of published runs in a file: typed fields, some of which may be absent, and measured figures."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

from shardlab.common.errors import UserError
from shardlab.common.fields import POSITIVE, FieldType, read_settings
from shardlab.common.files import read_file

T = TypeVar("T")


class Incomplete(Exception):
    """Error for a run that cannot be predicted because a value is missing or wrong.

    The message names the value, in a clause whose subject is the run, such as "does not say device".
    """


class Unknown(Incomplete):
    """Error for a run with an unknown name, such as that of a device or framework. The message has the name."""


def bounded(maximum: int, minimum: int = 1) -> FieldType:
    """Return the type of a whole number, which may be in quotes. The limits bound the cost of a simulation."""
    expected = f"a whole number from {minimum} to {maximum:,}"
    return FieldType(
        int,
        "N",
        lambda value: "" if type(value) is int and minimum <= value <= maximum else expected,
        of_file=lambda value: (
            int(figure) if (figure := _finite(value)) is not None and figure == int(figure) else value
        ),
    )


def _finite(value: Any) -> float | None:
    """Return a number, which may be in quotes (None: the value is not a number)."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        figure = float(value)
    except (ValueError, OverflowError):
        return None
    return figure if math.isfinite(figure) else None


def number(value: Any) -> float | None:
    """Return a positive number, which may be in quotes (None: the value is not a positive number)."""
    figure = _finite(value)
    return figure if figure is not None and figure > 0 else None


Count = Annotated[int, bounded(10**12)]
Parameters = Annotated[float, replace(POSITIVE, of_file=number)]
Ranks = Annotated[int, bounded(32768)]
Stages = Annotated[int, bounded(4096)]
ZeroStage = Annotated[int, bounded(3, minimum=0)]
Text = Annotated[str, FieldType(str, "TEXT", lambda _: "", of_file=str)]
Switch = Annotated[bool, FieldType(bool, "", lambda _: "", of_file=bool)]


@dataclass(frozen=True, kw_only=True)
class ModelRecord:
    """Sizes of a model, and its activation function.

    Attributes:
        experts, top_k, capacity_factor: sizes of a mixture of experts. Without a capacity factor, no token is dropped.
    """

    layers: Stages
    hidden: Count
    heads: Count
    seq_len: Count
    kv_heads: Count | None = None
    ffn_hidden: Count | None = None
    ffn_type: Text | None = None
    vocab: Count | None = None
    tied_embeddings: Switch | None = None
    head_dim: Count | None = None
    experts: Count | None = None
    top_k: Count | None = None
    capacity_factor: Annotated[float | None, replace(POSITIVE, of_file=number)] = None


@dataclass(frozen=True, kw_only=True)
class HardwareRecord:
    """Devices and network.

    Attributes:
        device: name of the device in `shardlab.simulate.hardware.device`.
        network: name of the link between nodes in `shardlab.simulate.hardware.cluster`.
        nics: number of these links of a node.
        gpu, interconnect: texts in which names are looked for if `device` or `network` is absent.
    """

    device: Text | None = None
    gpus: Ranks
    gpus_per_node: Count | None = None
    network: Text | None = None
    nics: Annotated[int | None, bounded(1024)] = None
    gpu: Text | None = None
    interconnect: Text | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelismRecord:
    """Parallelism of a run.

    Attributes:
        dp: number of data-parallel ranks of one replica. The ZeRO stage says what is sharded over them.
        dp_replicate: number of replicas, as in FSDP's hybrid sharding.
        offload: offloaded values with their place, as in "activations=host".
        interleave_v: number of stages of each pipeline rank in an interleaved schedule.
    """

    tp: Ranks
    pp: Stages
    dp: Ranks | None = None
    dp_replicate: Ranks | None = None
    ep: Ranks | None = None
    offload: Text | None = None
    cp: Ranks | None = None
    zero_stage: ZeroStage | None = None
    interleave_v: Stages | None = None
    schedule: Text | None = None
    sequence_parallel: Switch | None = None
    reshard_after: Text | None = None
    first_last_stage_one_layer_less: Switch = False


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """Number of sequences of a step on all ranks, and of a microbatch on one data-parallel rank."""

    global_sequences: Count
    micro_batch: Count


@dataclass(frozen=True, kw_only=True)
class StateRecord:
    """Number of parameters of a model without further sizes, and the ranks over which its state is sharded."""

    params: Parameters
    dp: Ranks
    zero_stage: ZeroStage = 0


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Run in a file, without its measured figures.

    Attributes:
        framework: name of the recipe that describes the run's framework.
        switches: values of the recipe's switches by name.
        precision: dtype of matrix products: fp32, bf16, fp16 or fp8.
        gradients: dtype in which gradients are reduced. Any value other than fp32 means 16 bits.
    """

    id: Text
    source: Text
    framework: Text | None = None
    switches: Mapping[str, Text] = field(default_factory=dict[str, str])
    model: ModelRecord
    hardware: HardwareRecord
    parallelism: ParallelismRecord
    batch: BatchRecord
    precision: Text | None = None
    gradients: Text | None = None
    recompute: Text | None = None


def read_record(row: dict[str, Any]) -> RunRecord:
    """Return the record of a row.

    Raises:
        Incomplete: if a required field is missing, or a value has the wrong type.
    """
    sections = {
        "model": parse(ModelRecord, section(row, "model")),
        "hardware": parse(HardwareRecord, section(row, "hardware")),
        "parallelism": parse(ParallelismRecord, section(row, "parallelism")),
        "batch": parse(BatchRecord, section(row, "batch")),
    }
    return parse(RunRecord, {"source": ""} | {name: row[name] for name in row if row[name] is not None} | sections)


def section(row: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the object that a row has under a name, or an empty one if it is absent."""
    value = row.get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def parse(kind: type[T], fields: dict[str, Any]) -> T:
    """Convert a JSON object to a record. `8`, `8.0` and `"8"` all mean 8, and null means absent.

    Raises:
        Incomplete: if a required field is missing, or a value has the wrong type.
    """
    present = {name: value for name, value in fields.items() if value is not None}
    try:
        return read_settings(kind, present, "", strict=False)
    except UserError as error:
        text = str(error)
        raise Incomplete(text if text.startswith("does not say") else f"says that {text}") from None


Memory = Literal["allocated", "reserved", "nvidia-smi", "model state"]
"""Content of a measured figure: peak of the bytes of tensors (allocated), bytes that the allocator has reserved, all
bytes in use on the GPU, or only parameters, gradients and optimizer state."""

GB, GIB = 1e9, 2.0**30

MEMORY_FIELDS: tuple[tuple[str, Memory, float], ...] = (
    ("peak_memory_GB", "allocated", GB),
    ("peak_allocated_GiB", "allocated", GIB),
    ("peak_memory_GiB", "reserved", GIB),
    ("peak_reserved_GiB", "reserved", GIB),
    ("peak_memory_GB_nvidia_smi", "nvidia-smi", GIB),
    ("model_state_memory_GB", "model state", GB),
)
"""(field of `measured`, its content, its unit). The Zero Bubble paper and the ZeRO paper count in 10^9, torchtitan and
nvidia-smi in 2^30."""

DENIED = {"no", "not", "never", "without", "close", "near", "nearly", "almost"}
"""A text with "out of memory" or "OOM" and one of these words does not say that the run ran out of memory."""

STATUS = ("status", "result", "outcome", "error")
"""Fields of a row that may say how a run ended."""


@dataclass(frozen=True)
class Measurement:
    """Measured figures of a run.

    Attributes:
        seconds: seconds of a step, or of one block if `of_block` (None: unknown).
        bytes: bytes in the memory of the fullest GPU (None: unknown).
        memory: content of these bytes.
        out_of_memory: whether the run ran out of memory.
        of_block: whether the seconds are those of one block's forward and backward pass on one microbatch.
    """

    seconds: float | None
    bytes: float | None
    memory: Memory
    out_of_memory: bool = False
    of_block: bool = False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a file: a JSON list of objects, each with a unique `id`.

    Raises:
        UserError: if the file has other contents.
    """
    content = read_file(path, "JSON")
    if not isinstance(content, list) or not content:
        raise UserError(f'{path} has no list of runs; write [{{"id": ..., "source": ..., "model": ...}}, ...]')
    rows = cast(list[Any], content)
    for place, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(cast(dict[str, Any], row).get("id"), str):
            raise UserError(f"{path}: run {place} is no object with an id; each run needs one that is its own")
    ids = [row["id"] for row in rows]
    duplicate = next((name for name in ids if ids.count(name) > 1), None)
    if duplicate is not None:
        raise UserError(f"{path}: two runs are called {duplicate!r}; give each an id of its own")
    return rows


def read_figures(row: dict[str, Any]) -> Measurement:
    """Return the measured figures of a row. If it only has tokens/s, they are converted to seconds."""
    measured, out = section(row, "measured"), ran_out_of_memory(row)
    seconds = number(measured.get("iteration_s")) or number(section(row, "derived").get("iteration_s"))
    seconds = seconds or _from_tokens(row, measured)
    if seconds is None and (block := _of_block(measured)):
        return Measurement(block, None, "allocated", out, of_block=True)
    for name, memory, unit in MEMORY_FIELDS:
        figure = number(measured.get(name))
        if figure is not None:
            return Measurement(seconds, figure * unit, memory, out)
    return Measurement(seconds, None, "allocated", out)


TIMES = {
    "measured": (
        *("iteration_s", "tokens_per_s_per_gpu", "tokens_per_s"),
        *("layer_total_ms", "layer_forward_ms", "layer_backward_ms"),
    ),
    "derived": ("iteration_s",),
}
"""Fields with the time or speed of a step, or with the time of one block, by section."""


def wrong_measurement(row: dict[str, Any]) -> str:
    """Describe the first invalid time or speed of a row ("": none).

    Valid are numbers above 0, and texts that say that memory ran out.
    """
    for part, names in TIMES.items():
        for name in names:
            value = section(row, part).get(name)
            if value is not None and number(value) is None and not _says_so(value):
                return (
                    f"gives {value!r} as {part} {name}; give a number above 0, or leave it out if the run did not end"
                )
    return ""


def ran_out_of_memory(row: dict[str, Any]) -> bool:
    """Return whether a row says that the run ran out of memory.

    The row says so by a true field `out_of_memory` or `oom` in the row or in `measured`, or by a text "out of memory"
    or "OOM" in place of a measured value or in one of the fields of `STATUS`.
    """
    fields = section(row, "measured")
    flags = [value for key, value in (*row.items(), *fields.items()) if _says_so(key)]
    texts = (row.get("measured"), *fields.values(), *map(row.get, STATUS))
    return any(map(_is_true, flags)) or any(map(_says_so, texts))


def _says_so(text: Any) -> bool:
    words = re.findall("[a-z0-9]+", text.lower()) if isinstance(text, str) else []
    return bool({"oom"} & {*words} or "out of memory" in " ".join(words)) and not DENIED & {*words}


def _is_true(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "yes", "1", "oom"))


def _from_tokens(row: dict[str, Any], measured: dict[str, Any]) -> float | None:
    per_gpu, total = number(measured.get("tokens_per_s_per_gpu")), number(measured.get("tokens_per_s"))
    if per_gpu and (gpus := number(section(row, "hardware").get("gpus"))):
        total = per_gpu * gpus
    sequences, block = (
        number(section(row, name).get(key)) for name, key in (("batch", "global_sequences"), ("model", "seq_len"))
    )
    return sequences * block / total if sequences and block and total else None


def _of_block(measured: dict[str, Any]) -> float | None:
    """Return the seconds of one block, from fields in milliseconds."""
    total, parts = measured.get("layer_total_ms"), ("layer_forward_ms", "layer_backward_ms")
    forward, backward = (number(measured.get(part)) for part in parts)
    milliseconds = number(total) or (forward + backward if forward and backward else None)
    return milliseconds / 1e3 if milliseconds else None
