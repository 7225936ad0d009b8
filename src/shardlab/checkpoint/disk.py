"""The few operations on a disk that a checkpoint is made of, so that tests can crash between any two of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path


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
