"""Tensors as the bytes of a safetensors file, one after the other.

The library's own writer wants them all at once, holds Python's lock while it writes, and tells no checksum. It is what
reads these files.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.models.tensors.tensor_files import DTYPES

ALIGNMENT = 8
"""Bytes; a header is filled up with spaces, so that tensors are aligned when the file is mapped."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def chunks_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The chunks of a file with contiguous tensors of the CPU, by name."""
    yield header_of({name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()})
    yield from map(bytes_of, tensors.values())


def header_of(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """What stands before the bytes of tensors, which follow in this order: for each name its dtype and shape."""
    header: dict[str, Any] = {}
    at = 0
    for name, (dtype, shape) in tensors.items():
        end = at + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % ALIGNMENT)
    return len(written).to_bytes(8, "little") + written


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the CPU."""
    return memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))
