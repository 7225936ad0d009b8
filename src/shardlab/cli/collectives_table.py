"""Table of `shardlab collectives show`: a row for each rank, with lines from who gives to who receives."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import table_of

if TYPE_CHECKING:
    from shardlab.execute.show import Numbers, Shown

LABELS = {
    "broadcast": "copy",
    "scatter": "cut",
    "gather": "join",
    "all_gather": "join",
    "reduce_scatter": "sum, cut",
    "all_to_all": "swap",
    "barrier": "wait",
    "send": "send",
}
"""Labels of what happens between those who give and those who receive; a reduction's is its own name."""

BOXES = {
    "": " ",
    "L": "─",
    "R": "─",
    "LR": "─",
    "LD": "┐",
    "LU": "┘",
    "LUD": "┤",
    "LRD": "┬",
    "LRU": "┴",
    "LRUD": "┼",
    "RD": "┌",
    "RU": "└",
    "RUD": "├",
    "UD": "│",
}
"""The sign of a place from which lines go left, right, up and down."""

ASCII = str.maketrans("─│▶┐┘┤┬┴┼┌└├", "-|>+++++++++")
"""ASCII characters in place of lines and arrows, for a terminal or a pipe without Unicode."""


def print_shown(console: Console, shown: Shown, says: str, root: int, by: str) -> None:
    """A collective: its name, what it does, and a row for each rank."""
    (name,) = shown.steps
    ranks = range(len(shown.before))
    rooted = name in ("broadcast", "scatter", "send")
    gives = [root] if rooted else ranks
    takes = [(root + 1) % len(ranks)] if name == "send" else [root] if name in ("gather", "reduce") else ranks
    lines = diagram(len(ranks), gives, takes, LABELS.get(name, by))
    is_barrier = name == "barrier"
    table = _table(*(("came at", "", "went on at") if is_barrier else ("before", "", "after")))
    room = _room(console, len(lines[0]), 2)
    for rank in ranks:
        cells = [short(each[rank], room, times=is_barrier) for each in (shown.before, shown.after)]
        table.add_row(str(rank), cells[0], Text(_plain(console, lines[rank]), "cyan"), cells[1])
    console.print(f"[bold]{name}[/]  {says}")
    console.print(table)
    console.print()


def print_same(console: Console, name: str, double: Shown, *, same: bool) -> None:
    """Two collectives in a row, which do what one does."""
    one, other = double.steps
    table = _table("before", one, other)
    room = _room(console, 0, 3)
    for rank in range(len(double.before)):
        table.add_row(str(rank), *(short(each[rank], max(room, len(one))) for each in double.tensors))
    console.print(f"[bold]{name} = {one} + {other}[/]")
    console.print(table)
    verdict = "[green]the same on every rank: yes[/]" if same else "[red]the same on every rank: no[/]"
    console.print(f"{verdict}\n")


def _table(*columns: str) -> Table:
    table = table_of("rank", *columns, words=1 + len(columns))
    table.columns[0].justify = "right"
    return table


def _room(console: Console, taken: int, columns: int) -> int:
    """Characters for the numbers of one column."""
    return max(8, (console.width - len("rank") - taken - 2 * (columns + 2)) // columns)


def _plain(console: Console, line: str) -> str:
    return line.translate(ASCII) if console.options.ascii_only else line


def short(numbers: Numbers, room: int, *, times: bool = False) -> str:
    """A tensor's numbers; the middle ones give way where there is too little room, and `-` says that there is none."""
    if numbers is None:
        return "-"
    words = [f"{n:.0f} ms" if times else f"{n:02.0f}" if n == int(n) else f"{n:.4g}" for n in numbers]
    text, kept = " ".join(words), len(words) - 1
    while len(text) > room and kept > 1:
        kept -= 1
        text = " ".join([*words[:kept], "..", words[-1]])
    return text


def diagram(ranks: int, gives: Collection[int], takes: Collection[int], label: str) -> list[str]:
    """Lines from those who give, through what happens, to those who receive; a line of text for each rank.

    >>> diagram(3, [0, 1, 2], [0, 1, 2], "sum")
    ['──┐       ┌─▶', '──┼─ sum ─┼─▶', '──┘       └─▶']
    """
    ends = [only for side in (gives, takes) if len(side) == 1 for only in side]
    middle = ends[0] if ends else (ranks - 1) // 2
    lines: list[str] = []
    for rank in range(ranks):
        here = rank == middle
        into = "──" if rank in gives else "  "
        center = f"─ {label} ─" if here else " " * (len(label) + 4)
        out = "─▶" if rank in takes else "  "
        left = _joint(rank, middle, gives, left=rank in gives, right=here)
        right = _joint(rank, middle, takes, left=here, right=rank in takes)
        lines.append(into + left + center + right + out)
    return lines


def _joint(rank: int, middle: int, ends: Collection[int], *, left: bool, right: bool) -> str:
    """The sign where a rank's line meets the upright one, which reaches from the middle to all ends."""
    top, bottom = min(middle, *ends), max(middle, *ends)
    up, down = top < rank <= bottom, top <= rank < bottom
    return BOXES["L" * left + "R" * right + "U" * up + "D" * down]
