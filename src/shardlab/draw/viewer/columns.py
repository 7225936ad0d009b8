"""Packed tables: a JSON header, then columns of numbers as little-endian arrays. `encode` compresses the whole.

`assets/model.js` reads this layout: the length of the header in four bytes, the header, then the columns, each aligned
to a multiple of 8 bytes from the end of the header. The header's entry `columns` maps a column's name to its type, its
offset in bytes from the end of the header, and its number of items.
"""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

TYPES = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "i32": "<i4", "f64": "<f8"}
"""Types of columns, and their names in numpy."""

Item = TypeVar("Item", bound=Hashable)


class Columns:
    """Columns of numbers by name."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[str, np.ndarray]] = {}

    def add(self, name: str, kind: str, values: Sequence[float] | np.ndarray) -> None:
        """Add a column of one of `TYPES`."""
        self._arrays[name] = kind, np.asarray(values, dtype=TYPES[kind])

    def pack(self, header: Mapping[str, Any]) -> bytes:
        """Return the header and all columns, uncompressed."""
        descriptions: dict[str, tuple[str, int, int]] = {}
        parts: list[bytes] = []
        offset = 0
        for name, (kind, values) in self._arrays.items():
            data = values.tobytes()
            padding = -len(data) % 8
            descriptions[name] = kind, offset, len(values)
            parts += [data, bytes(padding)]
            offset += len(data) + padding
        head = json.dumps({**header, "columns": descriptions}, separators=(",", ":")).encode()
        head += b" " * (-(len(head) + 4) % 8)
        return b"".join([struct.pack("<I", len(head)), head, *parts])


class Numbering(Generic[Item]):
    """Numbers of distinct items, counted from 0 in the order of their first use."""

    def __init__(self) -> None:
        self.number_of: dict[Item, int] = {}

    def __call__(self, item: Item) -> int:
        return self.number_of.setdefault(item, len(self.number_of))

    @property
    def items(self) -> list[Item]:
        return list(self.number_of)


def encode(packed: bytes) -> str:
    """Return packed tables as text for a page: compressed by zlib, in base64."""
    return base64.b64encode(zlib.compress(packed, 6)).decode("ascii")


def decode(text: str) -> tuple[dict[str, Any], dict[str, list[float]]]:
    """Return the header and the columns of tables encoded by `encode`."""
    packed = zlib.decompress(base64.b64decode(text))
    (length,) = struct.unpack_from("<I", packed)
    header = json.loads(packed[4 : 4 + length])
    columns = {
        name: np.frombuffer(packed, TYPES[kind], count, 4 + length + offset).tolist()
        for name, (kind, offset, count) in header["columns"].items()
    }
    return header, columns
