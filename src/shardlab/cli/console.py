"""Console of the commands: the terminal, or a pipe, where a table's last column is not filled up with blanks."""

from __future__ import annotations

import re
import sys
from typing import IO, Any, cast

from rich.console import Console


class Trimmed:
    """A text file into which lines go without the blanks at their ends."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        return self._file.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def stdout_console() -> Console:
    """The console of a command's output."""
    file = sys.stdout if sys.stdout.isatty() else cast(IO[str], Trimmed(sys.stdout))
    return Console(file=file, highlight=False)
