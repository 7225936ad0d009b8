"""Tensors as the bytes of a safetensors file, one after the other.

The library's own writer wants them all at once, holds Python's lock while it writes, and tells no checksum. It is what
reads these files.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.models.tensors.tensor_files import DTYPES

ALIGNMENT = 8
"""Bytes; a header is filled up with spaces, so that tensors are aligned when the file is mapped."""

NAMES = {dtype: name for name, dtype in DTYPES.items()}


def chunks_of(tensors: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The chunks of a file with contiguous tensors of the CPU, by name."""
    header: dict[str, Any] = {}
    at = 0
    for name, tensor in tensors.items():
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % ALIGNMENT)
    yield len(written).to_bytes(8, "little") + written
    for tensor in tensors.values():
        yield memoryview(cast(Any, tensor.flatten().view(torch.uint8).numpy()))
