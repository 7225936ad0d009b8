"""Tensors of a folder's safetensors files, of which parts are read; no pickle is ever opened."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# safetensors leaves its annotations out.

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shardlab.errors import UserError
from shardlab.models.weight_files import index_of, weights_at
from shardlab.program.nesting import read_file

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Numbers that weights may be in, by safetensors' names."""

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TensorFiles:
    """Tensors by name, of which only what is asked for is read.

    Files are mapped to be read only: what a process maps to write counts as memory that it has taken.

    Args:
        files: the file that has each tensor (None: all that are in `paths`).
        paths: the files.
    """

    def __init__(self, paths: list[Path]) -> None:
        self._opened = {path: _open(path) for path in paths}
        self._file = {name: file for file in self._opened.values() for name in cast(list[str], file.keys())}
        self._bytes = {name: each for path in paths for name, each in _tensors(path)}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._file[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The numbers that a tensor is in.

        Raises:
            UserError: when they are no floating-point numbers of 16 bits or more.
        """
        written = self._file[name].get_slice(name).get_dtype()
        if written not in DTYPES:
            raise UserError(f"tensor {name} is in {written}; weights are exchanged in {', '.join(DTYPES)}")
        return DTYPES[written]

    def read(self, name: str, *where: slice | int) -> Tensor:
        """Part of a tensor, or with no `where` all of it."""
        dtype = self.dtype(name)
        whole = self._bytes[name].view(f"u{dtype.itemsize}").reshape(self.shape(name))
        return torch.from_numpy(np.array(whole[where] if where else whole)).view(dtype)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="numpy")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read as safetensors ({reason(error)})") from None


def _tensors(path: Path) -> Iterator[tuple[str, np.ndarray[Any, np.dtype[np.uint8]]]]:
    """The names and bytes of a file's tensors."""
    mapped = np.memmap(path, np.uint8, "r")
    start = 8 + int.from_bytes(mapped[:8].tobytes(), "little")
    header: dict[str, dict[str, Any]] = json.loads(mapped[8:start].tobytes())
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, mapped[start + begin : start + end]


def files_of(single: Path) -> list[Path]:
    """The files of a folder's weights: one, or those of its index.

    Raises:
        UserError: when there are none, or those of the index are missing.
    """
    folder, path = single.parent, weights_at(single)
    if path == single:
        return [single]
    if path is not None:
        index = read_file(path, "JSON")
        names = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(names, Mapping) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{path} has no weight_map from tensors to files")
        paths = [folder / Path(name).name for name in sorted(set(cast(Mapping[str, str], names).values()))]
        if missing := [path.name for path in paths if not path.is_file()]:
            raise UserError(f"{folder} lacks {', '.join(missing)}, which {path.name} names; copy the whole folder")
        return paths
    if pickles := sorted(path.name for pattern in PICKLES for path in folder.glob(pattern)):
        raise UserError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which could run any code and is not read; convert it "
            "to safetensors first, with save_pretrained of transformers"
        )
    raise UserError(
        f"{folder} has no {single.name} or {index_of(single).name}; name a folder with weights in safetensors"
    )


def reason(error: OSError | SafetensorError) -> str:
    """The system's words for an error, which safetensors gives as a number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    number = re.search(r"os error (\d+)", str(error))
    return os.strerror(int(number[1])) if number else str(error)
