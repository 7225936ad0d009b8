"""Names of files of weights: one, or several and their index, as transformers has them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

ENDING = ".safetensors"
SINGLE = "model.safetensors"

SHARD_BYTES = 5 * 10**9
"""Bytes of a file, unless one tensor has more: transformers' own bound."""


def index_of(single: Path) -> Path:
    """The index that stands for a file of weights where there are several of them."""
    return single.with_name(single.name + ".index.json")


def shards_of(sizes: Iterable[int], single: str, shard_bytes: int) -> list[str]:
    """For tensors of so many bytes, in order, the names of the files that have them: one, or several with numbers."""
    numbers: list[int] = []
    number = filled = 0
    for size in sizes:
        if filled and filled + size > shard_bytes:
            number, filled = number + 1, 0
        filled += size
        numbers.append(number)
    stem, count = single.removesuffix(ENDING), number + 1
    return [single if count == 1 else f"{stem}-{each + 1:05}-of-{count:05}{ENDING}" for each in numbers]


def index_text(files: Mapping[str, str], total: int) -> str:
    """The index of several files of weights.

    Args:
        files: of each tensor.
        total: bytes of all tensors.
    """
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(files)}, indent=2) + "\n"


def weights_at(single: Path) -> Path | None:
    """A file of weights, or the index of several in its place; None where there is neither.

    Where there are both, the file is read, as transformers does.
    """
    return next((path for path in (single, index_of(single)) if path.is_file()), None)
