"""A run's last weights, written by all its ranks: none of them ever has more than its own and one layer."""

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
from shardlab.common.files import PART
from shardlab.execute.collect import averaged_weights, gather_layer
from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.models.named import ENDING, SHARD_BYTES, index_of, index_text, shards_of
from shardlab.models.tensors import whole_parameters
from shardlab.train.checkpoint import Disk, bytes_of, header_of
from shardlab.train.history import AVERAGED, WEIGHTS, written
from shardlab.train.launch.interrupt import say


class PartialFile:
    """A file that is filled bit by bit; after an error it drops the rest, since other ranks still give it.

    Args:
        path: its name once it is whole.
    """

    def __init__(self, path: Path, beginning: bytes) -> None:
        self.path, self._at = path, path.with_name(path.name + PART)
        self._error: OSError | None = None
        self._file: FileIO | None = None
        try:
            self._file = self._at.open("wb", buffering=0)
        except OSError as error:
            self._error = error
        self.write(beginning)

    def write(self, chunk: bytes | memoryview) -> None:
        """Append some bytes."""
        left = memoryview(chunk)
        try:
            while left and self._file and not self._error:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            self._error = error

    def end(self) -> None:
        """Wait until all its bytes are on the disk itself.

        Raises:
            UserError: when they could not be written.
        """
        with written(self.path):
            if self._error:
                raise self._error
            Disk().sync(self._at)

    def rename(self) -> None:
        """Give it its name.

        Raises:
            UserError: when that cannot be.
        """
        with written(self.path):
            self._at = self._at.replace(self.path)
            Disk().sync_folder(self.path.parent)

    def close(self, *, drop: bool) -> None:
        """Close it, and remove it if it is to be dropped."""
        if self._file:
            self._file.close()
        if drop:
            with suppress(OSError):  # there may be none, or no disk any more
                self._at.unlink()


def save_weights(state: State, out: Path, *, shard_bytes: int = SHARD_BYTES) -> list[str]:
    """Write a run's weights, and their averages if there are any, unless some are not finite. Every rank calls this.

    Returns:
        names of the files that could not be written into the folder.
    """
    if not _finite(state):
        return []
    lost = _written(state, out / WEIGHTS, shard_bytes)
    if state.settings.optimizer.ema is not None:
        with averaged_weights(state):
            lost += _written(state, out / AVERAGED, shard_bytes)
    return lost


def _finite(state: State) -> bool:
    """Whether the weights of all ranks are numbers."""
    mine = all(bool(kept.isfinite().all()) for kept in state.kept.values())
    found = torch.tensor(int(mine), device=state.settings.device)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def _written(state: State, single: Path, shard_bytes: int) -> list[str]:
    """Write weights into the run's folder, or else into one for temporary files; rank 0 says so."""
    why = _write(state, single, shard_bytes)
    if not why:
        return []
    elsewhere = [_temporary_folder() if state.rank == 0 else ""]
    dist.broadcast_object_list(elsewhere, 0)
    folder = Path(elsewhere[0])
    failed = not elsewhere[0] or _write(state, folder / single.name, shard_bytes)
    if state.rank == 0:
        say(f"shardlab: {why}")
        if not failed:
            say(f"shardlab: the weights are in {folder / single.name} instead")
        elif elsewhere[0]:
            shutil.rmtree(folder, ignore_errors=True)
    return [single.name]


def _temporary_folder() -> str:
    """A new folder for temporary files; nothing where none can be made."""
    try:
        return tempfile.mkdtemp(prefix="shardlab-")
    except OSError:
        return ""


def _write(state: State, single: Path, shard_bytes: int) -> str:
    """Write all parameters by name, `layers.<l>.<name>`, into one file, or several and their index.

    The files are dealt to the ranks. Each layer is put together on the rank that writes it; all first layers of files
    come before the second ones, so that ranks write at the same time.

    Returns:
        what went wrong on some rank, for all to know.
    """
    model, rank, dtype = state.model, state.rank, torch_dtype(state.settings.precision.parameters)
    tensors = [
        {f"layers.{block}.{each.name}": (dtype, each.shape) for block, each in model.run(layer).parameters()}
        for layer in range(model.layers)
    ]
    sizes = [sum(dtype.itemsize * math.prod(shape) for _, shape in each.values()) for each in tensors]
    files = shards_of(sizes, single.name, shard_bytes)
    layers: dict[str, list[int]] = {}
    for layer, file in enumerate(files):
        layers.setdefault(file, []).append(layer)
    writers = {file: number % dist.get_world_size() for number, file in enumerate(layers)}
    mine = {
        file: PartialFile(
            single.with_name(file), header_of({name: it for layer in own for name, it in tensors[layer].items()})
        )
        for file, own in layers.items()
        if writers[file] == rank
    }
    for layer in sorted(range(model.layers), key=lambda layer: layers[files[layer]].index(layer)):
        _give(state, layer, writers[files[layer]], mine.get(files[layer]))
    index: list[PartialFile] = []
    if len(layers) > 1 and rank == 0:
        names = {name: file for its, file in zip(tensors, files, strict=True) for name in its}
        index.append(PartialFile(index_of(single), index_text(names, sum(sizes)).encode()))
    shards, old = list(mine.values()), [partial(_remove_old, single)] if rank == 0 else []
    why = (
        _agreed([file.end for file in (*shards, *index)])
        or _agreed(old)  # or else a run that is killed now would leave an index of old files and new ones
        or _agreed([file.rename for file in shards])
        or _agreed([file.rename for file in index])
    )
    for file in (*shards, *index):
        file.close(drop=bool(why))
    dist.barrier()
    return why


def _give(state: State, layer: int, writer: int, file: PartialFile | None) -> None:
    """Put a layer together on the rank that writes it, which then forgets it."""
    flat = gather_layer(state, state.kept, layer, writer)
    if flat is not None and file is not None:
        for _, _, tensor in whole_parameters(state.model, layer, flat):
            file.write(bytes_of(tensor))


def _remove_old(single: Path) -> None:
    """Remove weights that are to be replaced, first what names the others.

    Raises:
        UserError: when that cannot be.
    """
    folder = single.parent
    shards = folder.glob(f"{glob.escape(single.stem)}-{'[0-9]' * 5}-of-{'[0-9]' * 5}{ENDING}")
    with written(single):
        for path in (index_of(single), single, *shards):
            path.unlink(missing_ok=True)
        Disk().sync_folder(folder)


def _agreed(acts: Iterable[Callable[[], None]]) -> str:
    """Act on every rank; what went wrong on the first on which something did, for all to know, or nothing."""
    mine = ""
    try:
        for act in acts:
            act()
    except UserError as error:
        mine = str(error)
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return next(filter(None, everyone), "")
