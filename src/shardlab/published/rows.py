"""Reading a file of published runs: rows as they are written, with what they measured."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.errors import UserError
from shardlab.program.nesting import read_file
from shardlab.published.records import number, section

Memory = Literal["allocated", "reserved", "nvidia-smi", "model state"]
"""Content of a measured figure: what tensors take at their peak; what the allocator has reserved for them; all that
the GPU holds; or parameters, gradients and optimizer state alone."""

GB, GIB = 1e9, 2.0**30

MEMORY_FIELDS: tuple[tuple[str, Memory, float], ...] = (
    ("peak_memory_GB", "allocated", GB),
    ("peak_memory_GiB", "reserved", GIB),
    ("peak_memory_GB_nvidia_smi", "nvidia-smi", GIB),
    ("model_state_memory_GB", "model state", GB),
)
"""A field of `measured`, what it includes, and its unit: the Zero Bubble paper and the ZeRO paper count in 10^9,
torchtitan and nvidia-smi in 2^30."""

DENIED = {"no", "not", "never", "without", "close", "near", "nearly", "almost"}
"""Words with which a text that tells of memory does not say that it ended a run."""

STATUS = ("status", "result", "outcome", "error")
"""Fields of a row that may say how a run ended."""


@dataclass(frozen=True)
class Measurement:
    """Measured figures of a run.

    Attributes:
        seconds: of a step (None: not given).
        bytes: of one GPU's memory (None: not given).
        memory: what these bytes include.
        out_of_memory: whether the run ended for want of memory.
        of_block: whether the seconds are those of one block, forward and backward, for a microbatch.
    """

    seconds: float | None
    bytes: float | None
    memory: Memory
    out_of_memory: bool = False
    of_block: bool = False


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The runs in a file: a JSON list of objects, each with an `id`.

    Raises:
        UserError: for anything else.
    """
    written = read_file(path, "JSON")
    if not isinstance(written, list) or not written:
        raise UserError(f'{path} holds no list of runs; write [{{"id": ..., "source": ..., "model": ...}}, ...]')
    rows = cast(list[Any], written)
    for place, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(cast(dict[str, Any], row).get("id"), str):
            raise UserError(f"{path}: run {place} is no object with an id; each run needs one that is its own")
    ids = [row["id"] for row in rows]
    twice = next((name for name in ids if ids.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: two runs are called {twice!r}; give each an id of its own")
    return rows


def measured_of(row: dict[str, Any]) -> Measurement:
    """Find the measured figures of a row; seconds come from tokens/s where only these are given."""
    measured, out = section(row, "measured"), ran_out_of_memory(row)
    seconds = number(measured.get("iteration_s")) or number(section(row, "derived").get("iteration_s"))
    seconds = seconds or _from_tokens(row, measured)
    if seconds is None and (block := _of_block(measured)):
        return Measurement(block, None, "allocated", out, of_block=True)
    for field, memory, unit in MEMORY_FIELDS:
        found = number(measured.get(field))
        if found is not None:
            return Measurement(seconds, found * unit, memory, out)
    return Measurement(seconds, None, "allocated", out)


TIMES = {
    "measured": (
        *("iteration_s", "tokens_per_s_per_gpu", "tokens_per_s"),
        *("layer_total_ms", "layer_forward_ms", "layer_backward_ms"),
    ),
    "derived": ("iteration_s",),
}
"""Fields that give a step's time or speed, by section."""


def wrong_measurement(row: dict[str, Any]) -> str:
    """Say which time or speed of a row is no number above 0, and no word for a run out of memory ("": none)."""
    for part, names in TIMES.items():
        for name in names:
            value = section(row, part).get(name)
            if value is not None and number(value) is None and not _says_so(value):
                return (
                    f"gives {value!r} as {part} {name}; give a number above 0, or leave it out where the run did not "
                    "end"
                )
    return ""


def ran_out_of_memory(row: dict[str, Any]) -> bool:
    """Whether a run says that it ended for want of memory.

    By a field `out_of_memory` or `oom` that is true, in the row or in `measured`; by these words in place of what
    should have been measured; or as the row's status.
    """
    fields = section(row, "measured")
    named = [value for key, value in (*row.items(), *fields.items()) if _says_so(key)]
    texts = (row.get("measured"), *fields.values(), *map(row.get, STATUS))
    return any(map(_is_true, named)) or any(map(_says_so, texts))


def _says_so(text: Any) -> bool:
    words = re.findall("[a-z0-9]+", text.lower()) if isinstance(text, str) else []
    return bool({"oom"} & {*words} or "out of memory" in " ".join(words)) and not DENIED & {*words}


def _is_true(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "yes", "1", "oom"))


def _from_tokens(row: dict[str, Any], measured: dict[str, Any]) -> float | None:
    each, all = number(measured.get("tokens_per_s_per_gpu")), number(measured.get("tokens_per_s"))
    if each and (gpus := number(section(row, "hardware").get("gpus"))):
        all = each * gpus
    sequences, block = (
        number(section(row, name).get(key)) for name, key in (("batch", "global_sequences"), ("model", "seq_len"))
    )
    return sequences * block / all if sequences and block and all else None


def _of_block(measured: dict[str, Any]) -> float | None:
    """Seconds, from milliseconds of one transformer layer."""
    total, parts = measured.get("layer_total_ms"), ("layer_forward_ms", "layer_backward_ms")
    forward, backward = (number(measured.get(part)) for part in parts)
    milliseconds = number(total) or (forward + backward if forward and backward else None)
    return milliseconds / 1e3 if milliseconds else None
