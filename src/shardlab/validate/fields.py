"""The fields of a published run as numbers: each row writes them in its own way, and some not at all."""

from __future__ import annotations

import math
import re
from typing import Any, cast

WHOLE = {
    "model": ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab", "seq_len"),
    "hardware": ("gpus", "gpus_per_node"),
    "parallelism": ("tp", "pp", "dp", "cp", "interleave_v"),
    "batch": ("global_sequences", "micro_batch"),
}
"""Fields that are whole numbers of 1 or more wherever they are given."""

MOST = {"layers": 4096, "pp": 4096, "interleave_v": 4096, "gpus": 32768, "tp": 32768, "dp": 32768, "cp": 32768}
"""What is replayed op by op has a limit."""

_OUT = re.compile(r"\boom\b|\bout[ _-]?of[ _-]?memory\b", re.IGNORECASE)
_NOT_OUT = re.compile(r"\b(no|not|never|without|close|near|nearly|almost)\b", re.IGNORECASE)
_NAMES_OUT = re.compile(r"(^|_)oom($|_)|out_?of_?memory", re.IGNORECASE)
_SAID_AT = ("status", "result", "outcome", "error")


class Incomplete(Exception):
    """A run does not say enough to be predicted; the message says what is missing."""


def section(row: dict[str, Any], name: str) -> dict[str, Any]:
    """One of a run's objects; an absent one is empty."""
    value = row.get(name)
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def number(value: Any) -> float | None:
    """A positive number, written as such or in quotes; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        found = float(value)
    except (ValueError, OverflowError):
        return None
    return found if math.isfinite(found) and found > 0 else None


def with_whole_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """The row with `8`, `8.0` and `"8"` all as 8; what is None is as if it were absent.

    Raises:
        Incomplete: for anything else where a whole number must stand.
    """
    read = dict(row)
    for name, keys in WHOLE.items():
        fields = {key: value for key, value in section(row, name).items() if value is not None}
        fields |= {key: _whole(key, fields[key]) for key in keys if key in fields}
        read[name] = fields
    stage = read["parallelism"].get("zero_stage", 0)
    if number(stage) not in (None, 1, 2, 3) or (number(stage) is None and stage not in (0, "0")):
        raise Incomplete(f"gives {stage!r} as zero stage, which is none of 0, 1, 2, 3")
    if "zero_stage" in read["parallelism"]:
        read["parallelism"]["zero_stage"] = int(float(stage))
    return read


def _whole(key: str, value: Any) -> int:
    found = number(value)
    if found is None or found != int(found):
        raise Incomplete(f"gives {value!r} as {key.replace('_', ' ')}, which is no whole number of 1 or more")
    if found > MOST.get(key, 10**12):
        raise Incomplete(f"gives {value!r} as {key.replace('_', ' ')}, which is more than can be replayed")
    return int(found)


def ran_out_of_memory(row: dict[str, Any]) -> bool:
    """Whether a run says that it ended for want of memory, in any of the ways in which tables do.

    A field of that name that is true, in the row or in `measured`; the words in place of what should have been
    measured; or as the row's status.
    """
    measured = row.get("measured")
    if isinstance(measured, str):
        return _says_out(measured)
    fields = section(row, "measured")
    named = any(_NAMES_OUT.search(key) and _is_true(value) for key, value in (*row.items(), *fields.items()))
    return named or any(_says_out(value) for value in (*fields.values(), *(row.get(key) for key in _SAID_AT)))


def _says_out(value: Any) -> bool:
    return isinstance(value, str) and bool(_OUT.search(value)) and not _NOT_OUT.search(value)


def _is_true(value: Any) -> bool:
    return value is True or value == 1 or (isinstance(value, str) and value.lower() in ("true", "yes", "1", "oom"))
