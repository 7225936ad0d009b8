"""Reading a checkpoint under any plan.

`Checkpoint.open` checks the files of a folder, and `Checkpoint.restore` fills in the state of a rank. A rank reads only
the ranges that it needs. `CheckpointTensors` finds them: it reads rows and columns of the whole model's parameters,
whatever plan wrote them.
"""

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
from shardlab.common.fields import read_table
from shardlab.common.files import read_file
from shardlab.execute.kernel_choice import choices_of
from shardlab.execute.state import State
from shardlab.models import Parameter
from shardlab.models.tensors.compute import Product
from shardlab.models.tensors.weights import TensorFiles, read_range
from shardlab.train.checkpoint.contents import EXACT, WEIGHTS, ParameterPiece, kept_ranges, make_moments, parse_pieces
from shardlab.train.checkpoint.write import MANIFEST, VERSION, checksum_of

STATE, CONFIG = "state.json", "config.toml"
"""Files of a checkpoint besides those with tensors and the manifest."""

METADATA = ".metadata"
"""File of a folder of torch.distributed.checkpoint that lists all tensors."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        folder: folder of the checkpoint.
        files: entries of the manifest by file: size, checksum, and the lengths of the tensors if it has any.
        state: state of the run besides tensors.
    """

    folder: Path
    files: Mapping[str, Mapping[str, Any]]
    state: Mapping[str, Any]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint, and check that all files exist with the right sizes. Files with tensors are not read.

        Raises:
            UserError: if a file is missing or has another size, a file without tensors has changed, or the format has
                another version.
        """
        manifest = read_table(read_file(folder / MANIFEST, "JSON"), str(folder / MANIFEST))
        if manifest.get("version") != VERSION:
            raise UserError(
                f"{folder} was written in version {manifest.get('version')!r} of the format, and this Shardlab reads "
                f"version {VERSION}; read it with the version of Shardlab that wrote it"
            )
        if manifest.pop("sha256", None) != checksum_of(manifest):
            raise UserError(f"{folder / MANIFEST} has changed: it does not match the SHA-256 in it")
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
        return cls(folder, entries, read_table(read_file(folder / STATE, "JSON"), str(folder / STATE)))

    def verify(self, rank: int = 0, ranks: int = 1) -> Checkpoint:
        """Check that files still have the SHA-256 checksums of the manifest: all files, or this rank's share of them.

        Args:
            rank: number of this rank.
            ranks: number of ranks that share the work.

        Returns:
            This checkpoint.

        Raises:
            UserError: if a file has changed.
        """
        by_size = sorted(self.files, key=lambda name: (-self.files[name]["size"], name))
        for name in by_size[rank::ranks]:
            _compare(self.folder / name, self.files[name])
        return self

    @property
    def step(self) -> int:
        """Number of optimizer steps before the checkpoint."""
        return self.state["step"]

    @property
    def validation_before(self) -> float:
        """Validation loss before the run's first step; NaN if it was not finite."""
        loss = self.state["validation_before"]
        return math.nan if loss is None else loss

    @property
    def threads(self) -> int:
        """Number of threads on which each rank computed. Older versions of Shardlab used one."""
        return self.state.get("threads", 1)

    @property
    def products(self) -> dict[Product, bool]:
        """Kernels that were chosen for matrix products. Older versions of Shardlab did not record them."""
        return choices_of(self.state.get("products", ()))

    @property
    def updates(self) -> int:
        """Number of updates that the optimizers had made. Skipped steps do not count."""
        return max(entry.get("updates", 0) for entry in self.files.values())

    @property
    def ranks(self) -> int:
        """Number of ranks that wrote the checkpoint."""
        return sum("tensors" in entry for entry in self.files.values())

    @property
    def size(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(entry["size"] for entry in self.files.values())

    @cached_property
    def ranges(self) -> dict[tuple[str, int], list[tuple[int, int, str, str]]]:
        """Stored ranges of the flat buffers, by kind and layer, ascending: (start, stop, file, name in the file)."""
        ranges: dict[tuple[str, int], list[tuple[int, int, str, str]]] = defaultdict(list)
        for file, entry in self.files.items():
            for name, length in entry.get("tensors", {}).items():
                kind, layer, start = name.split(".")
                ranges[kind, int(layer)].append((int(start), int(start) + length, file, name))
        return {key: sorted(layer_ranges) for key, layer_ranges in ranges.items()}

    @cached_property
    def kinds(self) -> set[str]:
        """Kinds of tensors in the checkpoint."""
        return {kind for kind, _ in self.ranges}

    @cached_property
    def pieces(self) -> dict[tuple[int, str], list[ParameterPiece]]:
        """Pieces in which each parameter of the whole model is stored, by block and name."""
        return parse_pieces(self.state["layers"])

    def restore(self, state: State) -> int:
        """Fill in the state that a rank keeps. Its plan and data types may differ from those of the checkpoint.

        Returns:
            Number of bytes that were read from tensors.
        """
        if self.kinds - {WEIGHTS, EXACT}:
            make_moments(state, self.updates)
        sources = {kind: CheckpointTensors(self, kind) for kind in self.kinds}
        for part in kept_ranges(state):
            source = self._source(part.kind, part.tensor.dtype, sources)
            length = state.shapes.flat[part.layer]
            elements = read_range(source, state.model, part.layer, length, part.start, part.stop, part.tensor.dtype)
            part.tensor.detach().copy_(elements)
        state.step = self.step
        if state.settings.precision.scaled and self.state["loss_scale"] is not None:
            state.loss_scale.scale, state.loss_scale.calm = self.state["loss_scale"]
        return sum(source.bytes_read for source in sources.values())

    def _source(self, kind: str, dtype: torch.dtype, sources: Mapping[str, CheckpointTensors]) -> CheckpointTensors:
        """Return the tensors from which values of one kind and data type are restored.

        Exact copies are restored from the weights if the checkpoint lacks them. Weights are restored from the exact
        copies if there are any and the checkpoint has the weights in another data type.
        """
        if kind == EXACT and EXACT not in sources:
            return sources[WEIGHTS]
        if kind == WEIGHTS and EXACT in sources and sources[WEIGHTS].stored_dtype != dtype:
            return sources[EXACT]
        return sources[kind]


class CheckpointTensors:
    """Tensors of one kind in a checkpoint, as matrices of the whole model's parameters.

    Attributes:
        bytes_read: number of bytes that were read so far.
    """

    def __init__(self, checkpoint: Checkpoint, kind: str) -> None:
        self._checkpoint = checkpoint
        self._kind = kind
        self._files: dict[str, TensorFiles] = {}
        self.bytes_read = 0

    @cached_property
    def stored_dtype(self) -> torch.dtype:
        """Data type of all tensors of this kind."""
        key = next(key for key in self._checkpoint.ranges if key[0] == self._kind)
        _, _, file, name = self._checkpoint.ranges[key][0]
        return self._opened(file).dtype(name)

    def dtype(self, block: int, parameter: Parameter) -> torch.dtype:
        """Return the data type of a parameter."""
        return self.stored_dtype

    def read(self, block: int, parameter: Parameter, matrix: int, rows: Tensor, columns: Tensor) -> Tensor:
        """Read a part of a parameter's matrix.

        Args:
            block: number of the block.
            parameter: the parameter.
            matrix: index of the matrix, if the parameter has several.
            rows: indices of the rows, ascending.
            columns: indices of the columns, consecutive.

        Returns:
            The elements, (rows, columns).
        """
        elements = torch.zeros(len(rows), len(columns), dtype=self.stored_dtype)
        for piece in self._checkpoint.pieces[block, parameter.name] if elements.numel() else ():
            experts, stored_rows, stored_columns = piece.numbers
            expert_index = (experts == matrix).nonzero()
            subset = torch.isin(rows, stored_rows).nonzero()[:, 0]
            low = int(torch.searchsorted(stored_columns, columns[0]))
            high = int(torch.searchsorted(stored_columns, columns[-1], right=True))
            if not len(expert_index) or not len(subset) or low == high:
                continue
            begins = torch.searchsorted(stored_rows, rows[subset]) + int(expert_index) * piece.rows
            into = stored_columns[low:high] - columns[0]
            elements[subset[:, None], into] = torch.cat(list(self._rows(piece, begins, low, high))).view(-1, high - low)
        return elements

    def _rows(self, piece: ParameterPiece, numbers: Tensor, low: int, high: int) -> Iterator[Tensor]:
        """Yield columns `low` to `high` of the rows `numbers` of a piece. Whole consecutive rows are read at once."""
        width = piece.columns
        breaks = torch.arange(1, len(numbers))
        if high - low == width:
            breaks = (numbers.diff() != 1).nonzero()[:, 0] + 1
        for run in torch.tensor_split(numbers, breaks):
            first = piece.start + int(run[0]) * width
            yield from self._range(piece.layer, first + low, first + (len(run) - 1) * width + high)

    def _range(self, layer: int, start: int, stop: int) -> Iterator[Tensor]:
        """Yield a range of a layer's flat buffer in consecutive parts, each from the file that has it."""
        ranges: Sequence[tuple[int, int, str, str]] = self._checkpoint.ranges.get((self._kind, layer), ())
        index = bisect_right(ranges, start, key=lambda entry: entry[0]) - 1
        while start < stop:
            if not 0 <= index < len(ranges) or not ranges[index][0] <= start < ranges[index][1]:
                raise UserError(f"{self._checkpoint.folder} lacks {self._kind} of layer {layer} from element {start}")
            begin, end, file, name = ranges[index]
            part = self._opened(file).read(name, slice(start - begin, min(stop, end) - begin))
            self.bytes_read += part.nbytes
            yield part
            start, index = min(stop, end), index + 1

    def _opened(self, file: str) -> TensorFiles:
        if file not in self._files:
            self._files[file] = TensorFiles([self._checkpoint.folder / file])
        return self._files[file]


def _compare(path: Path, entry: Mapping[str, Any]) -> None:
    """Check that a file still has the checksum with which it was written.

    Raises:
        UserError: if the checksum differs, or the file cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})") from None
    if checksum != entry["sha256"]:
        raise UserError(f"{path} has changed: its SHA-256 is not that in {MANIFEST}")
