"""How a checkpoint comes to be: all of it, or none of it, whenever the machine stops.

The order of operations is what makes it so:

1. Each rank writes its file into `step-000100.part`, and waits until it is on the disk (`write_shard`).
2. When all have, rank 0 writes the documents and then the manifest, which has the checksum of every file, and waits
   for each of them and for the folder's names.
3. Rank 0 renames the folder to `step-000100`, at once, and waits for that name.
4. Only then older checkpoints go, by a rename too, which is waited for as well before a file of theirs is removed.

So a folder with a checkpoint's name is complete, and there is one as soon as `commit` has returned once.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MANIFEST, VERSION = "manifest.json", 1

PART, OLD = ".part", ".old.part"
"""Ends of the names of folders that are no checkpoints yet, or no longer."""

_NAME = re.compile(r"step-(\d{6,})")


def folder_of(checkpoints: Path, step: int) -> Path:
    """The folder of the checkpoint after so many steps."""
    return checkpoints / f"step-{step:06}"


def steps_in(disk: Disk, checkpoints: Path) -> list[int]:
    """Steps of a folder's checkpoints, ascending."""
    return sorted(int(found[1]) for name in disk.names(checkpoints) if (found := _NAME.fullmatch(name)))


def part_of(folder: Path) -> Path:
    """Where a checkpoint is before it is complete."""
    return folder.with_name(folder.name + PART)


def file_of(rank: int) -> str:
    """Name of the file with a rank's tensors."""
    return f"rank-{rank:04}.safetensors"


def _note_of(rank: int) -> str:
    return f"rank-{rank:04}.json"


class Hashed:
    """Chunks that are counted and hashed on their way to a file."""

    def __init__(self, chunks: Iterable[bytes | memoryview]) -> None:
        self._chunks = chunks
        self._hash = hashlib.sha256()
        self._size = 0

    def __iter__(self) -> Iterator[bytes | memoryview]:
        for chunk in self._chunks:
            self._hash.update(chunk)
            self._size += len(chunk)
            yield chunk

    @property
    def entry(self) -> dict[str, Any]:
        """The file's size in bytes and its checksum, as the manifest has them."""
        return {"size": self._size, "sha256": self._hash.hexdigest()}


def write_shard(
    disk: Disk, folder: Path, rank: int, chunks: Iterable[bytes | memoryview], note: Mapping[str, Any]
) -> None:
    """Write a rank's file, and beside it for rank 0 its checksum and a note, of which the manifest will tell.

    Args:
        folder: the checkpoint's, once it is complete.
    """
    part = part_of(folder)
    disk.make_folder(part)
    hashed = Hashed(chunks)
    disk.write(part / file_of(rank), hashed)
    disk.sync(part / file_of(rank))
    disk.write(part / _note_of(rank), [json.dumps({**hashed.entry, **note}).encode()])


def remove_shard(part: Path, rank: int) -> None:
    """Remove what a rank has written of a checkpoint that was not completed, and its folder with the last rank's.

    Raises:
        OSError: if the disk fails, or other files remain in the folder.
    """
    (part / file_of(rank)).unlink(missing_ok=True)
    (part / _note_of(rank)).unlink(missing_ok=True)
    part.rmdir()


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """What a manifest has beside all else: it vouches for the files, and nothing else would vouch for it."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def commit(disk: Disk, folder: Path, ranks: int, documents: Mapping[str, str], keep: int) -> None:
    """Complete a checkpoint, once all ranks have written their files.

    Args:
        folder: its own, in the one of all checkpoints of the run.
        ranks: how many have written.
        documents: further files, by name.
        keep: how many checkpoints are kept, this one too; those of later steps, from before the run was resumed, go.

    Raises:
        OSError: when the disk fails, or a rank's file is not seen from here.
    """
    part, checkpoints = part_of(folder), folder.parent
    notes: Sequence[dict[str, Any]] = [json.loads(disk.read(part / _note_of(rank))) for rank in range(ranks)]
    files = {file_of(rank): note for rank, note in enumerate(notes)}
    for name, text in documents.items():
        hashed = Hashed([text.encode()])
        disk.write(part / name, hashed)
        disk.sync(part / name)
        files[name] = hashed.entry
    manifest = {"version": VERSION, "files": files}
    disk.write(part / MANIFEST, [json.dumps({**manifest, "sha256": checksum_of(manifest)}).encode()])
    disk.sync(part / MANIFEST)
    for rank in range(ranks):
        disk.remove(part / _note_of(rank))
    disk.sync_folder(part)
    if folder.name in disk.names(checkpoints):  # from before the run was resumed at an earlier step
        _take_away(disk, folder)
    disk.rename(part, folder)
    disk.sync_folder(checkpoints)
    disk.sync_folder(checkpoints.parent)
    step = int(folder.name.partition("-")[2])
    before = [other for other in steps_in(disk, checkpoints) if other < step]
    later = [other for other in steps_in(disk, checkpoints) if other > step]
    for other in (*before[: max(0, len(before) - keep + 1)], *later):
        _take_away(disk, folder_of(checkpoints, other))
    disk.sync_folder(checkpoints)  # or after a crash a file might be gone, and the name still be there
    for name in disk.names(checkpoints):
        if name.endswith(OLD):
            disk.remove(checkpoints / name)


def _take_away(disk: Disk, folder: Path) -> None:
    """Take a checkpoint's name from a folder, which is then removed."""
    disk.rename(folder, folder.with_name(folder.name + OLD))


# The few operations on a disk that a checkpoint is made of, so that tests can crash between any two of them.


class Disk:
    """The disk of this machine. What was written is safe from a crash after `sync`, and a name after `sync_folder`."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and those above it, unless they are there."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file anew."""
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                left = memoryview(chunk).cast("B")
                while left:  # a disk that is nearly full takes a part
                    left = left[file.write(left) :]

    def read(self, path: Path) -> bytes:
        """Read a small file."""
        return path.read_bytes()

    def names(self, path: Path) -> list[str]:
        """Names in a folder, ascending; none if there is no such folder."""
        return sorted(os.listdir(path)) if path.is_dir() else []

    def sync(self, path: Path) -> None:
        """Wait until a file's bytes are on the disk itself."""
        _sync(path, os.O_RDWR)

    def sync_folder(self, path: Path) -> None:
        """Wait until a folder's names are on the disk itself."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Give a file or folder another name in the same folder, at once; nothing has the new name yet."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with all that is in it."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    finally:
        os.close(number)
