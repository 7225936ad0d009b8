"""Where a run's files go, and that they can be written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from shardlab.errors import UserError


@contextmanager
def written(path: Path) -> Generator[Path, None, None]:
    """Make it the user's mistake that `path` cannot be written.

    Raises:
        UserError: with the path and the reason.
    """
    try:
        yield path
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """A sentence on a file that cannot be written."""
    return UserError(
        f"{path} cannot be written ({error.strerror or error}); free some space, or name a folder on another disk with "
        "--out"
    )


def require_writable(folder: Path) -> None:
    """Refuse the folder of a run that cannot be made, or written into if it is there, before ranks find that out.

    Raises:
        UserError: with the reason.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".shardlab-", dir=there))
    except OSError as error:
        raise UserError(
            f"--out {folder}: nothing can be written there ({error.strerror}); name another folder, one of your own"
        ) from error


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name-1`, or the first number that is not taken."""
    number = 1
    while os.path.exists(parent / f"{name}-{number}"):  # also where it may not be looked at
        number += 1
    return parent / f"{name}-{number}"
