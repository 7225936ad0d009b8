"""Where ranks meet that are started here: a file in a folder that goes with the process that has started them."""

from __future__ import annotations

import fcntl
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from shardlab.errors import UserError

PREFIX = "shardlab-ranks-"

HELD = "held"
"""The file of such a folder that its process has locked, as long as it lives."""

ROOM = 1 << 15
"""Bytes that ranks write there at most, while they meet."""


@contextmanager
def meeting_file() -> Generator[Path]:
    """Name a file that does not exist, for torch's FileStore; folders whose processes were killed are removed first.

    Raises:
        UserError: when there is no room in the folder for temporary files, or it cannot be written.
    """
    try:
        _sweep(Path(tempfile.gettempdir()))
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    except OSError as error:
        raise _no_room(error) from None
    try:
        try:
            held = _hold(folder)
        except OSError as error:
            raise _no_room(error) from None
        with held:
            yield folder / "store"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _hold(folder: Path) -> FileIO:
    """Lock a folder's file before it has its name, so that nobody finds it unlocked."""
    new = folder / "new"
    new.write_bytes(bytes(ROOM))
    held = FileIO(new, "ab")
    _lock(held)
    new.rename(folder / HELD)
    return held


def _lock(file: FileIO) -> bool:
    """Lock a file, unless another process has."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a file system that knows no locks is swept by nobody
        return False
    return True


def _sweep(temporary: Path) -> None:
    """Remove folders whose processes were killed before they could."""
    for held in temporary.glob(f"{PREFIX}*/{HELD}"):
        try:
            file = FileIO(held, "ab")
        except OSError:  # it has just gone, or is another user's
            continue
        with file:
            if _lock(file):
                shutil.rmtree(held.parent, ignore_errors=True)


def _no_room(error: OSError) -> UserError:
    why = error.strerror or str(error)
    return UserError(
        f"ranks meet at a file in the folder for temporary files, which cannot be written ({error.filename}: {why}); "
        "make room there, or name another folder in the environment variable TMPDIR"
    )
