"""Sizes as people write them, 64KB or 1.5 MiB, and back."""

from __future__ import annotations

import math
import re

from shardlab.program import UserError

POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
"""KB and KiB are both 1024 bytes, as in nccl-tests."""

_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([KMGT]?)(?:I?B)?\s*", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of a size.

    >>> parse_size("64MB"), parse_size("1.5 k"), parse_size("12")
    (67108864, 1536, 12)

    Raises:
        UserError: when it is no size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise UserError(f"{text!r} is not a size; write a number and a unit, such as 1KB, 512 or 64MB")
    size = float(found[1]) * 1024 ** POWERS[found[2].upper()]
    if size != int(size):
        raise UserError(f"{text!r} is {size} bytes; give a whole number of bytes")
    return int(size)


def size_text(size: float) -> str:
    """A size in its largest fitting unit.

    >>> size_text(1536), size_text(64 * 1024 * 1024), size_text(7)
    ('1.5 KB', '64 MB', '7 B')
    """
    power = min(4, int(math.log(size, 1024) + 1e-9)) if size >= 1 else 0
    unit = ("B", "KB", "MB", "GB", "TB")[power]
    return f"{size / 1024**power:.4g} {unit}"


def sizes_between(smallest: int, largest: int, factor: int = 2) -> list[int]:
    """Sizes from the smallest to the largest, each `factor` times the one before.

    Raises:
        UserError: when there are none.
    """
    if smallest < 4:
        raise UserError(f"the smallest size is {smallest} bytes; one float32 number has 4: give 4 or more")
    if largest < smallest:
        raise UserError(
            f"the largest size, {size_text(largest)}, is less than the smallest, {size_text(smallest)}; exchange them"
        )
    if factor < 2:
        raise UserError(f"each size is {factor} times the one before, so there is no end; give 2 or more")
    return [smallest * factor**step for step in range(int(math.log(largest / smallest, factor) + 1e-9) + 1)]
