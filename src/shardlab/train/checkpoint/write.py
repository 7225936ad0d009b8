"""Writing a checkpoint, which is complete or absent even if the machine crashes.

The order of operations guarantees that:

1. Each rank writes its file into `step-000100.part`, and waits until it is on the disk (`write_shard`).
2. Once all ranks have done so, rank 0 writes the documents and then the manifest, which has the checksum of every file.
   It waits until these files and the names in the folder are on the disk (`commit`).
3. Rank 0 renames the folder to `step-000100`, and waits until that name is on the disk.
4. Only then are older checkpoints removed. They are renamed too, and their files are removed once the new names are on
   the disk.

A folder with the name of a checkpoint is therefore complete, and after the first `commit` there is always one.
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
"""Name of the file that lists all others, and version of the format."""

PART, OLD = ".part", ".old.part"
"""Suffixes of folders that are not checkpoints yet, or no longer."""

_NAME = re.compile(r"step-(\d{6,})")


def folder_of(checkpoints: Path, step: int) -> Path:
    """Return the folder of the checkpoint after `step` steps."""
    return checkpoints / f"step-{step:06}"


def steps_in(disk: Disk, checkpoints: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending."""
    return sorted(int(match[1]) for name in disk.names(checkpoints) if (match := _NAME.fullmatch(name)))


def part_of(folder: Path) -> Path:
    """Return the folder of a checkpoint before it is complete."""
    return folder.with_name(folder.name + PART)


def file_of(rank: int) -> str:
    """Return the name of the file with a rank's tensors."""
    return f"rank-{rank:04}.safetensors"


class HashedChunks:
    """Iterator over chunks that counts their bytes and computes their checksum."""

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
        """Size in bytes and checksum of the chunks so far, as in the manifest."""
        return {"size": self._size, "sha256": self._hash.hexdigest()}


def write_shard(
    disk: Disk, folder: Path, rank: int, chunks: Iterable[bytes | memoryview], note: Mapping[str, Any]
) -> None:
    """Write a rank's file, and beside it a file with its entry in the manifest, which rank 0 reads.

    Args:
        disk: disk to write to.
        folder: folder of the checkpoint once it is complete.
        rank: number of the rank.
        chunks: content of the file.
        note: further fields of its entry.
    """
    part = part_of(folder)
    disk.make_folder(part)
    hashed = HashedChunks(chunks)
    disk.write(part / file_of(rank), hashed)
    disk.sync(part / file_of(rank))
    disk.write(part / _note_of(rank), [json.dumps({**hashed.entry, **note}).encode()])


def remove_shard(part: Path, rank: int) -> None:
    """Remove the files that a rank has written for an incomplete checkpoint, and then its folder if that is empty.

    Raises:
        OSError: if the disk fails, or other files remain in the folder.
    """
    (part / file_of(rank)).unlink(missing_ok=True)
    (part / _note_of(rank)).unlink(missing_ok=True)
    part.rmdir()


def checksum_of(manifest: Mapping[str, Any]) -> str:
    """Return the checksum of a manifest, which must not have its entry `sha256` yet: this checksum is stored there."""
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def commit(disk: Disk, folder: Path, ranks: int, documents: Mapping[str, str], keep: int) -> None:
    """Complete a checkpoint, once all ranks have written their files, and remove old ones.

    Args:
        disk: disk to write to.
        folder: folder of the checkpoint, inside the folder of all checkpoints of the run.
        ranks: number of ranks.
        documents: contents of further files, by name.
        keep: number of checkpoints to keep, including this one. Checkpoints of later steps are always removed: they are
            from before the run was resumed at an earlier step.

    Raises:
        OSError: if the disk fails, or a rank's file is not visible on this host.
    """
    part, checkpoints = part_of(folder), folder.parent
    notes: Sequence[dict[str, Any]] = [json.loads(disk.read(part / _note_of(rank))) for rank in range(ranks)]
    files = {file_of(rank): note for rank, note in enumerate(notes)}
    for name, text in documents.items():
        hashed = HashedChunks([text.encode()])
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
        _mark_old(disk, folder)
    disk.rename(part, folder)
    disk.sync_folder(checkpoints)
    disk.sync_folder(checkpoints.parent)
    step = int(folder.name.partition("-")[2])
    earlier = [other for other in steps_in(disk, checkpoints) if other < step]
    later = [other for other in steps_in(disk, checkpoints) if other > step]
    for other in (*earlier[: max(0, len(earlier) - keep + 1)], *later):
        _mark_old(disk, folder_of(checkpoints, other))
    disk.sync_folder(checkpoints)  # otherwise a crash could leave a checkpoint's name on a folder without its files
    for name in disk.names(checkpoints):
        if name.endswith(OLD):
            disk.remove(checkpoints / name)


class Disk:
    """Operations on the disk that write a checkpoint. Tests replace them to crash between any two of them.

    The bytes of a file are safe from a crash after `sync`, and names in a folder after `sync_folder`.
    """

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents, unless they exist."""
        path.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """Write a file, and replace an older one."""
        with path.open("wb", buffering=0) as file:
            for chunk in chunks:
                remaining = memoryview(chunk).cast("B")
                while remaining:  # a disk that is nearly full may write a part
                    remaining = remaining[file.write(remaining) :]

    def read(self, path: Path) -> bytes:
        """Read a small file."""
        return path.read_bytes()

    def names(self, path: Path) -> list[str]:
        """Return the names in a folder, ascending; empty if the folder does not exist."""
        return sorted(os.listdir(path)) if path.is_dir() else []

    def sync(self, path: Path) -> None:
        """Wait until the bytes of a file are on the disk."""
        _sync(path, os.O_RDWR)

    def sync_folder(self, path: Path) -> None:
        """Wait until the names in a folder are on the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder within its folder, atomically. The new name must not exist yet."""
        old.rename(new)

    def remove(self, path: Path) -> None:
        """Remove a file, or a folder with its content."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _note_of(rank: int) -> str:
    return f"rank-{rank:04}.json"


def _mark_old(disk: Disk, folder: Path) -> None:
    """Rename the folder of a checkpoint that is to be removed."""
    disk.rename(folder, folder.with_name(folder.name + OLD))


def _sync(path: Path, flags: int) -> None:
    number = os.open(path, flags)
    try:
        os.fsync(number)
    finally:
        os.close(number)
