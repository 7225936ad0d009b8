"""Files of a run's last weights, which all ranks write together.

`save_weights` gathers one layer at a time on the rank that writes it, so no rank needs memory for more than its own
slices and one layer. The files appear under their names together: each rank writes to a `PartialFile`, and all of them
are renamed once every rank has succeeded.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import glob
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist

from shardlab.common.errors import UserError
from shardlab.common.files import PART_SUFFIX
from shardlab.execute.collect import averaged_weights, gather_layer
from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import gather_objects
from shardlab.models.named import ENDING, SHARD_BYTES, index_of, index_text, shards_of
from shardlab.models.tensors import whole_parameters
from shardlab.train.checkpoint.contents import bytes_of, header_of
from shardlab.train.checkpoint.write import Disk
from shardlab.train.history import AVERAGED, WEIGHTS, writing
from shardlab.train.launch.interrupt import say


class PartialFile:
    """A file that is written piece by piece under a temporary name.

    After an error, it accepts further pieces and drops them, because other ranks still send them.

    Args:
        path: name of the file once it is complete.
        beginning: first bytes.
    """

    def __init__(self, path: Path, beginning: bytes) -> None:
        self.path, self._at = path, path.with_name(path.name + PART_SUFFIX)
        self._error: OSError | None = None
        self._file: FileIO | None = None
        try:
            self._file = self._at.open("wb", buffering=0)
        except OSError as error:
            self._error = error
        self.write(beginning)

    def write(self, chunk: bytes | memoryview) -> None:
        """Append some bytes."""
        remaining = memoryview(chunk)
        try:
            while remaining and self._file and not self._error:  # a disk that is nearly full may write a part
                remaining = remaining[self._file.write(remaining) :]
        except OSError as error:
            self._error = error

    def end(self) -> None:
        """Wait until all bytes are safe on the disk.

        Raises:
            UserError: if they could not be written.
        """
        with writing(self.path):
            if self._error:
                raise self._error
            Disk().sync(self._at)

    def rename(self) -> None:
        """Rename the file to its final name.

        Raises:
            UserError: if it cannot be renamed.
        """
        with writing(self.path):
            self._at = self._at.replace(self.path)
            Disk().sync_folder(self.path.parent)

    def close(self, *, drop: bool) -> None:
        """Close the file, and remove it if `drop` is true."""
        if self._file:
            self._file.close()
        if drop:
            with suppress(OSError):  # the file may not exist, or the disk may have failed
                self._at.unlink()


def save_weights(state: State, out: Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write a run's weights, and their moving averages if there are any. Every rank calls this.

    Nothing is written if a weight is not finite.

    Args:
        state: this rank's tensors.
        out: folder of the run.
        shard_bytes: size above which the weights are split into several files.

    Returns:
        Names of the files that could not be written into the folder.
    """
    if not _all_finite(state):
        return []
    unwritten = _write_somewhere(state, out / WEIGHTS, shard_bytes)
    if state.settings.optimizer.ema is not None:
        with averaged_weights(state):
            unwritten += _write_somewhere(state, out / AVERAGED, shard_bytes)
    return unwritten


def _all_finite(state: State) -> bool:
    """Return whether the weights of all ranks are finite."""
    is_finite = all(bool(tensor.isfinite().all()) for tensor in state.kept.values())
    finite = torch.tensor(int(is_finite), device=state.settings.device)
    dist.all_reduce(finite, dist.ReduceOp.MIN)
    return bool(finite)


def _write_somewhere(state: State, single: Path, shard_bytes: int) -> list[str]:
    """Write weights into the run's folder. If that fails, write them into a temporary folder; rank 0 says where."""
    error = _write(state, single, shard_bytes)
    if not error:
        return []
    elsewhere = [""]
    if state.rank == 0:
        with suppress(OSError):  # there may be no place at all
            elsewhere[0] = tempfile.mkdtemp(prefix="shardlab-")
    dist.broadcast_object_list(elsewhere, 0)
    folder = Path(elsewhere[0])
    failed = not elsewhere[0] or _write(state, folder / single.name, shard_bytes)
    if state.rank == 0:
        say(f"shardlab: {error}")
        if not failed:
            say(f"shardlab: the weights are in {folder / single.name} instead")
        elif elsewhere[0]:
            shutil.rmtree(folder, ignore_errors=True)
    return [single.name]


def _write(state: State, single: Path, shard_bytes: int) -> str:
    """Write all parameters by name, `layers.<l>.<name>`, into one file, or into several files and an index.

    The files are distributed over the ranks, and each layer is gathered on the rank that writes its file. The first
    layers of all files come before the second ones, so that the ranks write at the same time.

    Returns:
        The error of the first rank that failed, on every rank; empty if none did.
    """
    model, rank, dtype = state.model, state.rank, torch_dtype(state.settings.precision.parameters)
    tensors = [
        {
            f"layers.{block}.{parameter.name}": (dtype, parameter.shape)
            for block, parameter in model.run(layer).parameters()
        }
        for layer in range(model.layers)
    ]
    sizes = [sum(dtype.itemsize * math.prod(shape) for _, shape in shapes.values()) for shapes in tensors]
    files = shards_of(sizes, single.name, shard_bytes)
    layers: dict[str, list[int]] = {}
    for layer, file in enumerate(files):
        layers.setdefault(file, []).append(layer)
    writers = {file: number % dist.get_world_size() for number, file in enumerate(layers)}
    own_files = {
        file: PartialFile(
            single.with_name(file), header_of({name: row for layer in part for name, row in tensors[layer].items()})
        )
        for file, part in layers.items()
        if writers[file] == rank
    }
    for layer in sorted(range(model.layers), key=lambda layer: layers[files[layer]].index(layer)):
        _gather_layer(state, layer, writers[files[layer]], own_files.get(files[layer]))
    index: list[PartialFile] = []
    if len(layers) > 1 and rank == 0:
        names = {name: file for parameters, file in zip(tensors, files, strict=True) for name in parameters}
        index.append(PartialFile(index_of(single), index_text(names, sum(sizes)).encode()))
    shards, old = list(own_files.values()), [partial(_remove_old, single)] if rank == 0 else []
    error = (
        _run_on_all([file.end for file in (*shards, *index)])
        or _run_on_all(old)  # before the renames, so that no index ever names old files and new ones
        or _run_on_all([file.rename for file in shards])
        or _run_on_all([file.rename for file in index])
    )
    for file in (*shards, *index):
        file.close(drop=bool(error))
    dist.barrier()
    return error


def _gather_layer(state: State, layer: int, writer: int, file: PartialFile | None) -> None:
    """Gather a layer on the rank that writes it, and append it to that rank's file."""
    flat = gather_layer(state, state.kept, layer, writer)
    if flat is not None and file is not None:
        for _, _, tensor in whole_parameters(state.model, layer, flat):
            file.write(bytes_of(tensor))


def _remove_old(single: Path) -> None:
    """Remove weights that are to be replaced: first the index, then the files that it names.

    Raises:
        UserError: if they cannot be removed.
    """
    folder = single.parent
    shards = folder.glob(f"{glob.escape(single.stem)}-{'[0-9]' * 5}-of-{'[0-9]' * 5}{ENDING}")
    with writing(single):
        for path in (index_of(single), single, *shards):
            path.unlink(missing_ok=True)
        Disk().sync_folder(folder)


def _run_on_all(actions: Iterable[Callable[[], None]]) -> str:
    """Run actions on every rank, and return the error of the first rank that failed; empty if none did."""
    own_error = ""
    try:
        for action in actions:
            action()
    except UserError as error:
        own_error = str(error)
    return next((error for error in gather_objects(own_error) if error), "")
