"""A run's folder belongs to one process at a time: to the one that has locked its metrics."""

from __future__ import annotations

import fcntl
from contextlib import suppress
from io import FileIO
from pathlib import Path

from shardlab.errors import UserError
from shardlab.train.saved import METRICS


def locked(folder: Path) -> FileIO:
    """Open a run's metrics to append to, which no other process can until the file is closed or this process ends.

    Raises:
        OSError: when it cannot be opened.
        UserError: when another process has it.
    """
    file = FileIO(folder / METRICS, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{folder} is in use by another process; wait until that has ended, or end it first") from None
    except OSError:  # a file system that knows no locks
        pass
    return file


def require_free(folder: Path) -> None:
    """Refuse a folder that another process is at work in.

    Raises:
        UserError: if so.
    """
    if (folder / METRICS).is_file():
        with suppress(OSError):
            locked(folder).close()
