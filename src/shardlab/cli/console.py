"""Output of the commands, to the terminal or a pipe: JSON, tables, and facts with their labels."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

INDENT = 16
"""Characters of a fact's label."""

MOST = 100_000
"""Columns into which any table goes."""

FOLDED = 12
"""Columns that a table's folded cells have at least."""

NARROWEST = 30
"""Columns that a fact's text has at least, however narrow the terminal is."""


class Trimmed:
    """A text file into which lines go without the blanks at their ends: of a table's last column, in a pipe."""

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


def print_json(data: object) -> None:
    """Print what --json asks for."""
    print(json.dumps(data, indent=2))


def table_of(*headings: str, words: int = 1, gap: int = 2) -> Table:
    """A table without lines, whose first columns are words and whose others are numbers."""
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), header_style="dim")
    for number, heading in enumerate(headings):
        table.add_column(heading, justify="left" if number < words else "right", no_wrap=True)
    return table


def whole_width(table: Table) -> int:
    """Columns that a table takes if none of its cells is cut."""
    return Console(width=MOST, file=StringIO()).measure(table).maximum


def print_whole(console: Console, table: Table, folded: int) -> None:
    """Print a table of which no cell is cut, however narrow the terminal is.

    Args:
        folded: number of the column of words whose cells go on below themselves in a terminal that is too narrow. A
            pipe has whole lines.
    """
    width, column = whole_width(table), table.columns[folded]
    if console.is_terminal and width > console.width:
        cells = max(
            Text.from_markup(cell).cell_len if isinstance(cell, str) else len(str(cell)) for cell in column.cells
        )
        column.width = min(cells, max(FOLDED, cells - (width - console.width)))
        column.no_wrap, column.overflow = False, "fold"
        width -= cells - column.width
    console.print(_Wide(table, max(width, console.width)), soft_wrap=width > console.width)


@dataclass(frozen=True)
class _Wide:
    """A table in so many columns, however many the console has."""

    table: Table
    width: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from console.render(self.table, options.update(width=self.width))


def print_fact(
    console: Console, label: str, text: str, style: str = "", figure: str = "", *, indent: int = INDENT
) -> None:
    """A label, perhaps a figure, and a text that goes on below itself where the terminal ends."""
    head = Text.assemble((label.ljust(indent), "dim"), (figure, "bold"), "  " if figure else "")
    style = style or ("dim" if figure else "")
    for line in Text(text, style).wrap(console, max(NARROWEST, console.width - len(head))) or [Text()]:
        console.print(head + line, soft_wrap=True)
        head = Text(" " * len(head))


def print_figures(console: Console, figures: Sequence[tuple[str, str, str]]) -> None:
    """Facts whose figures stand below each other: the label, the figure and the text of each."""
    width = max(len(figure) for _, figure, _ in figures)
    for label, figure, text in figures:
        print_fact(console, label, text, figure=figure.rjust(width))


def print_path(console: Console, label: str, path: Path) -> None:
    """Name a file that was written, in one line however long it is."""
    console.print(Text.assemble((label.ljust(INDENT), "dim"), (str(path), "bold")), soft_wrap=True)
