"""A checkpoint's folder, of which each rank reads the ranges that it needs, whatever plan wrote it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.common.files import read_file
from shardlab.execute.kernel_choice import choices_of
from shardlab.execute.state import State
from shardlab.models import Parameter
from shardlab.models.tensors.compute import Product
from shardlab.models.tensors.weights import TensorFiles, read_range
from shardlab.train.checkpoint.contents import EXACT, WEIGHTS, ParameterPiece, held, optimizer_of, read_pieces, stepped
from shardlab.train.checkpoint.write import MANIFEST, VERSION, checksum_of

STATE, CONFIG = "state.json", "config.toml"

HASHED = 2**20
"""Bytes that are read at once to be hashed."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: where it is.
        files: for each file its size and checksum, and more of those with tensors.
        state: all that is no tensor.
    """

    folder: Path
    files: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """A checkpoint whose files are all there, as long as they were written; those with tensors are not read.

        Raises:
            UserError: naming what is missing, cut off or of another version.
        """
        manifest = _table(folder / MANIFEST)
        if manifest.get("version") != VERSION:
            raise UserError(
                f"{folder} was written in version {manifest.get('version')!r} of the format, and this Shardlab reads "
                f"version {VERSION}; read it with the Shardlab that wrote it"
            )
        if manifest.pop("sha256", None) != checksum_of(manifest):
            raise UserError(f"{folder / MANIFEST} has changed: its SHA-256 is not the one in it")
        files = manifest.get("files")
        if not isinstance(files, dict) or not {STATE, CONFIG} <= files.keys():
            raise UserError(f"{folder / MANIFEST} does not name the checkpoint's files")
        entries = cast(dict[str, dict[str, Any]], files)
        for name, entry in entries.items():
            if not (folder / name).is_file():
                raise UserError(f"{folder / name} is missing")
            if (size := (folder / name).stat().st_size) != entry["size"]:
                raise UserError(f"{folder / name} has {size:,} bytes, and was written with {entry['size']:,}")
        for name in (STATE, CONFIG):
            _compare(folder / name, entries[name])
        return cls(folder, entries, _table(folder / STATE))

    def verify(self, rank: int = 0, ranks: int = 1) -> Checkpoint:
        """Read every file, or those that fall to one of so many ranks, and compare their checksums.

        Raises:
            UserError: naming the first file that differs.
        """
        by_size = sorted(self.files, key=lambda name: (-self.files[name]["size"], name))
        for name in by_size[rank::ranks]:
            _compare(self.folder / name, self.files[name])
        return self

    @property
    def step(self) -> int:
        """Steps that were taken before it."""
        return self.state["step"]

    @property
    def validation_before(self) -> float:
        """Loss on the validation text before the run's first step; not a number if it was not."""
        found = self.state["validation_before"]
        return math.nan if found is None else found

    @property
    def threads(self) -> int:
        """Threads on which each rank computed; older versions of Shardlab took one."""
        return self.state.get("threads", 1)

    @property
    def products(self) -> dict[Product, bool]:
        """Kernels that computed products; older versions of Shardlab did not record them."""
        return choices_of(self.state.get("products", ()))

    @property
    def updates(self) -> int:
        """Updates that optimizers had made: fewer than steps, where steps were left out."""
        return max(entry.get("updates", 0) for entry in self.files.values())

    @property
    def ranks(self) -> int:
        """How many ranks wrote it."""
        return sum("tensors" in entry for entry in self.files.values())

    @property
    def size(self) -> int:
        """Bytes of all its files but the manifest."""
        return sum(entry["size"] for entry in self.files.values())

    @cached_property
    def ranges(self) -> dict[tuple[str, int], list[tuple[int, int, str, str]]]:
        """By kind and layer, the ranges of its flat buffer: (start, stop, file, name there), ascending."""
        found: dict[tuple[str, int], list[tuple[int, int, str, str]]] = defaultdict(list)
        for file, entry in self.files.items():
            for name, length in entry.get("tensors", {}).items():
                kind, layer, start = name.split(".")
                found[kind, int(layer)].append((int(start), int(start) + length, file, name))
        return {key: sorted(each) for key, each in found.items()}

    @cached_property
    def kinds(self) -> set[str]:
        """The kinds of tensors that it has."""
        return {kind for kind, _ in self.ranges}

    @cached_property
    def pieces(self) -> dict[tuple[int, str], list[ParameterPiece]]:
        """Where each parameter lies."""
        return read_pieces(self.state["layers"])

    def tensors(self, kind: str) -> CheckpointTensors:
        """Its tensors of one kind, as parameters of the whole model."""
        return CheckpointTensors(self, kind)

    def restore(self, state: State) -> int:
        """Fill in all that a rank keeps; it may be under another plan, and in other numbers.

        Returns:
            bytes that were read of tensors.
        """
        if self.kinds - {WEIGHTS, EXACT}:
            for key in stepped(state.checked, state.rank):
                optimizer_of(state, key)
                state.make_moments(key, self.updates)
        sources = {kind: self.tensors(kind) for kind in self.kinds}
        for each in held(state):
            source = self._source(each.kind, each.tensor.dtype, sources)
            length = state.shapes.flat[each.layer]
            given = read_range(source, state.model, each.layer, length, each.start, each.stop, each.tensor.dtype)
            each.tensor.detach().copy_(given)
        state.step = self.step
        if state.settings.precision.scaled and self.state["loss_scale"] is not None:
            state.loss_scale.scale, state.loss_scale.calm = self.state["loss_scale"]
        return sum(source.bytes_read for source in sources.values())

    def _source(self, kind: str, dtype: torch.dtype, sources: Mapping[str, CheckpointTensors]) -> CheckpointTensors:
        """Where to read what a rank keeps: weights in other numbers are those of the exact copy, if there is one."""
        if kind == EXACT and EXACT not in sources:
            return sources[WEIGHTS]
        if kind == WEIGHTS and EXACT in sources and sources[WEIGHTS].numbers != dtype:
            return sources[EXACT]
        return sources[kind]


class CheckpointTensors:
    """A checkpoint's tensors of one kind, as matrices of the whole model's parameters.

    Attributes:
        bytes_read: of them so far.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str) -> None:
        self._checkpoint = checkpoint
        self._kind = kind
        self._files: dict[str, TensorFiles] = {}
        self.bytes_read = 0

    @cached_property
    def numbers(self) -> torch.dtype:
        """The numbers that they are in."""
        key = next(key for key in self._checkpoint.ranges if key[0] == self._kind)
        _, _, file, name = self._checkpoint.ranges[key][0]
        return self._opened(file).dtype(name)

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """The numbers that a parameter is in."""
        return self.numbers

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Some rows, ascending, and columns, which follow one another, of a parameter's matrix: (rows, columns)."""
        found = torch.zeros(len(rows), len(columns), dtype=self.numbers)
        for piece in self._checkpoint.pieces[block, parameter.name] if found.numel() else ():
            experts, mine, across = piece.numbers
            here = (experts == matrix).nonzero()
            wanted = torch.isin(rows, mine).nonzero()[:, 0]
            low = int(torch.searchsorted(across, columns[0]))
            high = int(torch.searchsorted(across, columns[-1], right=True))
            if not len(here) or not len(wanted) or low == high:
                continue
            begins = torch.searchsorted(mine, rows[wanted]) + int(here) * piece.rows
            into = across[low:high] - columns[0]
            found[wanted[:, None], into] = torch.cat(list(self._rows(piece, begins, low, high))).view(-1, high - low)
        return found

    def _rows(self, piece: ParameterPiece, numbers: Tensor, low: int, high: int) -> Iterator[Tensor]:
        """Columns `low` to `high` of some rows of a piece; rows that follow one another at once, if they are whole."""
        width = piece.columns
        breaks = torch.arange(1, len(numbers))
        if high - low == width:
            breaks = (numbers.diff() != 1).nonzero()[:, 0] + 1
        for run in torch.tensor_split(numbers, breaks):
            first = piece.start + int(run[0]) * width
            yield from self._range(piece.layer, first + low, first + (len(run) - 1) * width + high)

    def _range(self, layer: int, start: int, stop: int) -> Iterator[Tensor]:
        """A range of a layer's flat buffer, from as many files as it takes."""
        ranges: Sequence[tuple[int, int, str, str]] = self._checkpoint.ranges.get((self._kind, layer), ())
        at = bisect_right(ranges, start, key=lambda each: each[0]) - 1
        while start < stop:
            if not 0 <= at < len(ranges) or not ranges[at][0] <= start < ranges[at][1]:
                raise UserError(f"{self._checkpoint.folder} lacks {self._kind} of layer {layer} from element {start}")
            begin, end, file, name = ranges[at]
            part = self._opened(file).read(name, slice(start - begin, min(stop, end) - begin))
            self.bytes_read += part.nbytes
            yield part
            start, at = min(stop, end), at + 1

    def _opened(self, file: str) -> TensorFiles:
        if file not in self._files:
            self._files[file] = TensorFiles([self._checkpoint.folder / file])
        return self._files[file]


def _compare(path: Path, entry: Mapping[str, Any]) -> None:
    """Refuse a file that has another checksum than when it was written."""
    hashed = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := file.read(HASHED):
                hashed.update(chunk)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    if hashed.hexdigest() != entry["sha256"]:
        raise UserError(f"{path} has changed: its SHA-256 is not that in {MANIFEST}")


def _table(path: Path) -> dict[str, Any]:
    found = read_file(path, "JSON")
    if not isinstance(found, dict):
        raise UserError(f"{path} is no table of fields")
    return cast(dict[str, Any], found)
