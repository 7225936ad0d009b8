"""Streams whose reader may go while a run goes on: a terminal that is closed, or a `tee` that Ctrl-C ends too."""

from __future__ import annotations

import os
from typing import Any, TextIO, cast


class Unbroken:
    """A text stream that drops what nobody can read any more, instead of raising."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            return self._file.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        """Send everything nowhere from now on, also what is still in the buffer."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def unbroken(file: TextIO) -> TextIO:
    """The stream, as one that never raises for want of a reader."""
    return cast(TextIO, Unbroken(file))
