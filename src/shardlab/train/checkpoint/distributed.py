"""Folders of torch.distributed.checkpoint (DCP), read and written in parts of tensors by one process.

torch's own reader, writer and resharding do the work. `DistributedFiles` reads any part of a tensor, and keeps two
stored chunks in memory, since a parameter of Shardlab often consists of parts of two stored tensors.
`write_distributed` writes files as the ranks of FSDP would, each with its rows of every tensor. Two properties of torch
2.13 are worked around: its reader unpickles any class in `.metadata`, so a file could run any code, and its writer
keeps every tensor of a file until the file is complete.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import dataclasses
import enum
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardlab.common.errors import UserError
from shardlab.models.tensors.weights import DTYPES
from shardlab.train.checkpoint.contents import OutputTensor
from shardlab.train.checkpoint.read import METADATA

KEPT_CHUNKS = 2
"""Stored chunks that a reader keeps in memory."""


class DistributedFiles:
    """Tensors of a folder of torch.distributed.checkpoint by name.

    Args:
        folder: the folder.
        others: prefixes of names that are not read, such as "optimizer.".

    Attributes:
        left_out: prefixes in `others` that occur in the folder, without the dot.
        names: names of the tensors that are read.
        all_names: names of all entries, including those with a prefix in `others`.
    """

    def __init__(self, folder: Path, others: Sequence[str] = ()) -> None:
        self._reader = _Reader(folder)
        metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries = metadata.state_dict_metadata
        self.left_out = tuple(other.rstrip(".") for other in others if any(name.startswith(other) for name in entries))
        self._entries = {name: entry for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        self.all_names = frozenset(entries)
        self.names = {name for name in self._entries if not name.startswith(tuple(others))}
        self._folder = folder
        self._stored: dict[MetadataIndex, Tensor] = {}
        self.require_files(self.names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor.

        Raises:
            UserError: if it is not a floating-point dtype of 16 bits or more.
        """
        dtype = self._entries[name].properties.dtype
        if dtype not in DTYPES.values():
            name_of_dtype = str(dtype).removeprefix("torch.")
            raise UserError(f"tensor {name} is in {name_of_dtype}; weights are exchanged in {', '.join(DTYPES)}")
        return dtype

    def read(self, name: str, *indices: slice | int) -> Tensor:
        """Read the part `indices` of a tensor: a slice or an index for each of its first dims."""
        entry = self._entries[name]
        slices = [index if isinstance(index, slice) else slice(index, index + 1) for index in indices]
        slices += [slice(None) for _ in entry.size[len(indices) :]]
        spans = [part_slice.indices(length) for part_slice, length in zip(slices, entry.size, strict=True)]
        part = torch.empty([stop - start for start, stop, _ in spans], dtype=self.dtype(name))
        target = ChunkStorageMetadata(torch.Size(start for start, _, _ in spans), part.shape)
        for item in create_read_items_for_chunk_list(name, entry, [target]):
            stored = self._chunk(item.storage_index)
            part[_region(item.dest_offsets, item.lengths)] = stored[_region(item.storage_offsets, item.lengths)]
        return part[tuple(0 if isinstance(index, int) else slice(None) for index in indices)]

    def _chunk(self, index: MetadataIndex) -> Tensor:
        """Return a stored chunk. The last KEPT_CHUNKS chunks are cached."""
        if index not in self._stored:
            for old in [*self._stored][: 1 - KEPT_CHUNKS]:
                del self._stored[old]  # frees its memory before the next chunk is read
            entry = self._entries[index.fqn]
            sizes = next(chunk_entry.sizes for chunk_entry in entry.chunks if chunk_entry.offsets == index.offset)
            chunk, zeros = torch.empty(sizes, dtype=entry.properties.dtype), torch.Size([0] * len(sizes))
            item = ReadItem(LoadItemType.TENSOR, MetadataIndex(index.fqn), zeros, index, zeros, sizes)
            try:
                self._reader.read_data(LoadPlan([item]), _Destination(chunk)).wait()
            except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, AssertionError) as error:
                reason = str(error).partition("\n")[0]
                raise UserError(f"{self._folder}: {index.fqn} cannot be read ({reason}); the file is damaged") from None
            self._stored[index] = chunk
        return self._stored[index]

    def value(self, name: str) -> Any:
        """Return an entry that is a number or another plain value.

        Raises:
            UserError: if it cannot be read.
        """
        if name in self._entries:
            index = MetadataIndex(name, self._entries[name].chunks[0].offsets)
            self.require_files([name])
            return self._chunk(index).item()
        empty, destination = torch.Size([0]), _Value()
        index = MetadataIndex(name)
        item = ReadItem(LoadItemType.BYTE_IO, index, empty, index, empty, empty)
        try:
            self._reader.read_data(LoadPlan([item]), destination).wait()
        except (OSError, RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
            raise UserError(f"{self._folder}: {name} cannot be read ({str(error).splitlines()[0]})") from None
        return destination.value

    def require_files(self, names: Iterable[str]) -> None:
        """Require that all chunks of some tensors exist.

        Raises:
            UserError: if a file is missing or truncated, or the chunks of a tensor do not have all of its elements.
        """
        ends: dict[str, int] = defaultdict(int)
        for name in names:
            entry = self._entries[name]
            stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
            if stored != math.prod(entry.size):
                raise UserError(
                    f"{self._folder} has {stored:,} of the {math.prod(entry.size):,} elements of {name}; "
                    "it was written by only some of the ranks, or by another program"
                )
            for chunk in entry.chunks:
                location = self._reader.storage_data.get(MetadataIndex(name, chunk.offsets))
                if location is None:
                    raise UserError(f"{self._folder / METADATA} does not say in which file {name} is")
                ends[location.relative_path] = max(ends[location.relative_path], location.offset + location.length)
        for name, end in sorted(ends.items()):
            path = self._folder / name
            if not path.is_file():
                raise UserError(f"{self._folder} lacks {name}, which its {METADATA} names; copy the whole folder")
            if (size := path.stat().st_size) < end:
                raise UserError(f"{path} has {size:,} bytes, but its tensors end at byte {end:,}; copy it again")


def write_distributed(
    folder: Path,
    tensors: Sequence[OutputTensor],
    shard_bytes: int,
    follow: Callable[[list[Any]], Iterable[Any]] = iter,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Write tensors as torch.distributed.checkpoint does, in files of about equal size.

    Each file has the rows of every tensor that a rank of FSDP2 would have (`torch.chunk` along the first dim).

    Args:
        folder: an existing folder.
        tensors: the tensors, which are read while they are written.
        shard_bytes: approximate size of a file in bytes.
        follow: wraps the iterator over the files, to show progress.
        values: small tensors and plain values by name, such as "train_state.step". They are in the first file.
    """
    values = values or {}
    files = max(1, math.ceil(sum(tensor.nbytes for tensor in tensors) / shard_bytes))
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    writer.set_up_storage_writer(is_coordinator=True)
    plans = [SavePlan([item for tensor in tensors for item in _items(tensor, file, files)]) for file in range(files)]
    plans[0] = SavePlan([*plans[0].items, *(_item(*entry) for entry in values.items())])
    plans, metadata = create_default_global_save_plan([writer.prepare_local_plan(plan) for plan in plans])
    metadata.planner_data = {name: _path(name) for name in (*(tensor.name for tensor in tensors), *values)}
    planner = _Rows({tensor.name: tensor for tensor in tensors}, values)
    results = [writer.write_data(plan, planner).wait() for plan in follow(writer.prepare_global_plan(plans))]
    writer.finish(metadata, results)


def _path(name: str) -> tuple[str, ...]:
    """Return the keys of an entry in the nested dictionary that torchtitan saves."""
    section, _, rest = name.partition(".")
    return (section, rest) if section in ("optimizer", "train_state") else (name,)


def _item(name: str, value: Any) -> WriteItem:
    """Return the item for a small tensor or a plain value."""
    if not isinstance(value, Tensor):
        return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)
    zeros = torch.Size([0] * value.ndim)
    data = TensorWriteData(ChunkStorageMetadata(zeros, value.size()), TensorProperties(dtype=value.dtype), value.size())
    return WriteItem(MetadataIndex(name, zeros), WriteItemType.TENSOR, tensor_data=data)


def _items(tensor: OutputTensor, file: int, files: int) -> list[WriteItem]:
    """Return the item for the rows of a tensor that a file gets; empty if it gets none."""
    rows, *rest = tensor.shape
    rows_per_file = math.ceil(rows / files)
    start, stop = min(file * rows_per_file, rows), min((file + 1) * rows_per_file, rows)
    if start == stop:
        return []
    offsets = torch.Size([start, *(0 for _ in rest)])
    chunk = ChunkStorageMetadata(offsets, torch.Size([stop - start, *rest]))
    data = TensorWriteData(chunk, TensorProperties(dtype=tensor.dtype), torch.Size(tensor.shape))
    return [WriteItem(MetadataIndex(tensor.name, offsets), WriteItemType.SHARD, tensor_data=data)]


class _Rows(DefaultSavePlanner):
    """Planner that reads the rows of an item when the writer asks for them.

    The writer keeps a reference to every tensor of a file, so this class frees the storage of the previous tensor.
    """

    def __init__(self, tensors: Mapping[str, OutputTensor], values: Mapping[str, Any]) -> None:
        super().__init__()
        self._tensors, self._values = tensors, values
        self._last: Tensor | None = None

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """Return the rows of an item, or its value."""
        if (name := write_item.index.fqn) in self._values:
            if isinstance(value := self._values[name], Tensor):
                return value
            torch.save(value, stream := io.BytesIO())
            return stream
        if self._last is not None:
            self._last.untyped_storage().resize_(0)
        assert write_item.tensor_data is not None
        chunk = write_item.tensor_data.chunk
        self._last = rows = torch.empty(chunk.sizes, dtype=write_item.tensor_data.properties.dtype)
        row = 0
        for piece in self._tensors[write_item.index.fqn].pieces(chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]):
            rows[row : row + len(piece)] = piece
            row += len(piece)
        return rows


class _Destination(DefaultLoadPlanner):
    """Planner that loads into one given tensor."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__()
        self._tensor = tensor

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Return the tensor into which an item is read."""
        return self._tensor


class _Value(DefaultLoadPlanner):
    """Planner that loads one plain value, and runs no code of the file.

    Attributes:
        value: the value.
    """

    value: Any = None

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Store the value of an item."""
        self.value = torch.load(value, weights_only=True)


class _Reader(FileSystemReader):
    """Reader that accepts in `.metadata` only classes that describe tensors, since unpickling others could run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read `.metadata`.

        Raises:
            UserError: if it is missing, damaged, of an unknown version, or needs other classes.
        """
        path = Path(self.path) / METADATA
        if not path.is_file():
            raise UserError(
                f"{self.path} has no {METADATA}: the checkpoint is not complete; name one that was written to its end"
            )
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} cannot be read ({error}); save the checkpoint again with torch 2") from None
        except (AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError, MemoryError) as error:
            raise UserError(f"{path} is damaged, or of another version of torch ({error})") from None
        if not isinstance(metadata, Metadata) or not isinstance(getattr(metadata, "storage_data", None), dict):
            raise UserError(f"{path} is not of torch.distributed.checkpoint as torch 2 writes it on a file system")
        version = getattr(metadata, "version", None)  # torch wrote none until 2.8
        if version is not None and not str(version).startswith("1."):
            raise UserError(
                f"{path} was written in version {version} of the format, and this Shardlab reads version 1; save it "
                "again with an older torch"
            )
        return metadata


class _Unpickler(pickle.Unpickler):
    """Unpickler of `.metadata` that cannot run code of the file."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Return a class that describes tensors or their location in files, or a constant of torch."""
        package = module_name.partition(".")[0]
        if package == "pathlib" and global_name.endswith("Path"):
            return PurePath
        if (module_name, global_name) == ("torch.serialization", "_get_layout"):
            return super().find_class(module_name, global_name)
        if (module_name == "torch" or module_name.startswith("torch.distributed.checkpoint.")) and (
            "." not in global_name
        ):
            value = super().find_class(module_name, global_name)
            record = isinstance(value, type) and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum))
            if record or value is torch.Size or isinstance(value, torch.dtype | torch.layout):
                return value
        raise pickle.UnpicklingError(f"it needs {module_name}.{global_name}, which does not describe tensors")


def _region(offsets: Sequence[int], lengths: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))
