"""`shardlab collectives show NAME`: run a collective on real processes, and show each rank's tensor before and after.

`Collectives.run` runs the collective and, if two others in sequence give the same result (`PAIRS`), those as well.
`print_shown` prints a row for each rank, with lines from the ranks that give to the ranks that receive (`diagram`).
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardlab.cli.console import Report, table_of
from shardlab.cli.options import Count, Flag
from shardlab.common.errors import unknown_name
from shardlab.language import Reduction, UserError
from shardlab.train.launch.environment import require_port

if TYPE_CHECKING:
    from shardlab.execute.transport.trial import Numbers, TensorStates


NAMES = {
    "broadcast": "the root's tensor, on every rank",
    "scatter": "slice i of the root's tensor, on rank i",
    "gather": "the ranks' slices side by side, on the root",
    "reduce": "the {by} of the ranks' tensors, on the root",
    "all_reduce": "the {by} of the ranks' tensors, on every rank",
    "all_gather": "the ranks' slices side by side, on every rank",
    "reduce_scatter": "slice i of the ranks' sum, on rank i",
    "all_to_all": "slice i of every rank's tensor, on rank i",
    "barrier": "no rank continues before all ranks have arrived",
    "send": "the root's tensor, on the rank after it, which receives (send and recv)",
}
"""Result on each rank, for every collective and for a message between two ranks."""

REDUCING = {"reduce", "all_reduce"}
"""Collectives to which --reduction applies."""

PAIRS = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
}
"""For a collective: two others that, run in sequence, give the same result if the reduction is a sum."""

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
"""Label in the middle of each collective's diagram. The label of a reduction is its operation."""

_LINES: tuple[str, ...] = ("", "L", "R", "LR", "LD", "LU", "LUD", "LRD", "LRU", "LRUD", "RD", "RU", "RUD", "UD")
BOXES: dict[str, str] = dict(zip(_LINES, " ───┐┘┤┬┴┼┌└├│", strict=True))
"""Character of a junction, by the directions of its lines: left (L), right (R), up (U) and down (D)."""

ASCII = str.maketrans("─│▶┐┘┤┬┴┼┌└├", "-|>+++++++++")
"""Translation of lines and arrows into ASCII, for a terminal or a pipe without Unicode."""


@dataclass(frozen=True)
class Collectives:
    """Show what a collective does: the tensor of every rank before and after, on real processes.

    Collectives: broadcast, scatter, gather, reduce, all_reduce, all_gather, reduce_scatter, all_to_all, barrier, send
    (or recv); or `all` of them. If two other collectives in sequence give the same result, as for an all_reduce of
    sums, they are run as well.
    """

    action: tyro.conf.Positional[Literal["show"]]
    """The action: show."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of a collective, or all."""

    ranks: Count = 4
    """Number of processes."""

    root: Annotated[int, tyro.conf.arg(metavar="RANK")] = 0
    """Rank that sends or receives for all others, if the collective has one."""

    reduction: Literal["sum", "mean", "min", "max"] = "sum"
    """Operation of reduce and all_reduce."""

    json: Flag = False
    """Print only JSON."""

    def run(self) -> int:
        names = self._names()
        self._require_ranks()
        if self.reduction != "sum" and not REDUCING.intersection(names):
            raise UserError(
                f"--reduction {self.reduction}: {names[0]} has no reduction; give it to reduce, all_reduce or all"
            )
        require_port(os.environ)
        from shardlab.cli.train.before_ranks import failures_as_exit
        from shardlab.execute.transport.trial import show_rank
        from shardlab.train.launch.ranks import run_ranks

        doubles = [PAIRS[name] for name in names if name in PAIRS and self.reduction == "sum"]
        cases = [*((name,) for name in names), *doubles]
        with failures_as_exit():
            all_states = run_ranks(self.ranks, show_rank, cases, self.root, Reduction(self.reduction))
        if all_states is None:  # a rank of an existing world, but not the one that reports
            return 0
        results = {states.steps: states for states in all_states}
        self._report(names, results).show(json=self.json)
        return 0 if all(is_same(results, name) is not False for name in names) else 1

    def _names(self) -> list[str]:
        if self.name == "all":
            return list(NAMES)
        name = self.name.replace("-", "_")
        name = "send" if name == "recv" else name
        if name not in NAMES:
            raise unknown_name("collective", self.name, [*NAMES, "all"])
        return [name]

    def _require_ranks(self) -> None:
        if not 2 <= self.ranks <= 99:
            raise UserError(f"--ranks {self.ranks}: collectives are shown on 2 to 99 ranks; give --ranks 4")
        if not 0 <= self.root < self.ranks:
            raise UserError(f"--root {self.root}: there are ranks 0-{self.ranks - 1}; give one of them")

    def _report(self, names: list[str], results: dict[tuple[str, ...], TensorStates]) -> Report:
        equal: list[dict[str, Any]] = []
        report = Report(ranks=self.ranks, root=self.root, reduction=self.reduction, collectives=[], same=equal)
        if names != ["barrier"]:
            unit = 10 if self.ranks <= 10 else 100
            report.line(f"[dim]{unit} and {unit + 1} are elements 0 and 1 of rank 1's tensor; - is no tensor[/]\n")
        for name in names:
            states, summary = results[name,], NAMES[name].format(by=self.reduction)
            operation = self.reduction if name in REDUCING else "sum"
            report.data["collectives"].append(
                {"name": name, "says": summary, "before": states.inputs, "after": states.results}
            )
            report.draw(partial(print_shown, states=states, summary=summary, root=self.root, operation=operation))
            if (matches := is_same(results, name)) is not None:
                double = results[PAIRS[name]]
                equal.append({"name": name, "steps": PAIRS[name], "tensors": double.tensors, "same": matches})
                report.draw(partial(print_same, name=name, double=double, matches=matches))
        return report


def is_same(results: dict[tuple[str, ...], TensorStates], name: str) -> bool | None:
    """Return whether a collective and its pair in `PAIRS` gave equal results on every rank (None: no pair was run)."""
    double = results.get(PAIRS.get(name, ()))
    return None if double is None else double.results == results[name,].results


def print_shown(console: Console, states: TensorStates, summary: str, root: int, operation: str) -> None:
    """Print a collective: its name, what it does, and a row for each rank.

    Args:
        summary: description of the result.
        root: rank that sends or receives for all others.
        operation: name of the reduction.
    """
    (name,) = states.steps
    ranks = range(len(states.inputs))
    has_root = name in ("broadcast", "scatter", "send")
    senders = [root] if has_root else ranks
    receivers = [(root + 1) % len(ranks)] if name == "send" else [root] if name in ("gather", "reduce") else ranks
    lines = diagram(len(ranks), senders, receivers, LABELS.get(name, operation))
    if console.options.ascii_only:
        lines = [line.translate(ASCII) for line in lines]
    is_barrier = name == "barrier"
    table = _table(*(("came at", "", "went on at") if is_barrier else ("before", "", "after")))
    width = _column_width(console, len(lines[0]), 2)
    for rank in ranks:
        cells = [shorten(tensors[rank], width, times=is_barrier) for tensors in (states.inputs, states.results)]
        table.add_row(str(rank), cells[0], Text(lines[rank], "cyan"), cells[1])
    console.print(f"[bold]{name}[/]  {summary}")
    console.print(table)
    console.print()


def print_same(console: Console, name: str, double: TensorStates, *, matches: bool) -> None:
    """Print the tensors before and after two collectives in sequence, and compare the result with that of one."""
    one, other = double.steps
    table = _table("before", one, other)
    width = _column_width(console, 0, 3)
    for rank in range(len(double.inputs)):
        table.add_row(str(rank), *(shorten(tensors[rank], max(width, len(one))) for tensors in double.tensors))
    console.print(f"[bold]{name} = {one} + {other}[/]")
    console.print(table)
    verdict = "[green]the same on every rank: yes[/]" if matches else "[red]the same on every rank: no[/]"
    console.print(f"{verdict}\n")


def shorten(numbers: Numbers, width: int, *, times: bool = False) -> str:
    """Return the elements of a tensor as text, with `..` in place of elements that do not fit, and `-` for no tensor.

    Args:
        numbers: elements of the tensor, or times if `times` is set.
        width: width of the column in characters.
    """
    if numbers is None:
        return "-"
    words = [f"{n:.0f} ms" if times else f"{n:02.0f}" if n == int(n) else f"{n:.4g}" for n in numbers]
    text, count = " ".join(words), len(words) - 1
    while len(text) > width and count > 1:
        count -= 1
        text = " ".join([*words[:count], "..", words[-1]])
    return text


def diagram(ranks: int, senders: Collection[int], receivers: Collection[int], label: str) -> list[str]:
    """Draw lines from the ranks that give, through a label, to the ranks that receive. Return the text of each rank.

    >>> diagram(3, [0, 1, 2], [0, 1, 2], "sum")
    ['──┐       ┌─▶', '──┼─ sum ─┼─▶', '──┘       └─▶']
    """
    ends = [end for side in (senders, receivers) if len(side) == 1 for end in side]
    middle = ends[0] if ends else (ranks - 1) // 2
    lines: list[str] = []
    for rank in range(ranks):
        is_middle = rank == middle
        tail = "──" if rank in senders else "  "
        center = f"─ {label} ─" if is_middle else " " * (len(label) + 4)
        arrow = "─▶" if rank in receivers else "  "
        left_joint = _joint(rank, middle, senders, has_left=rank in senders, has_right=is_middle)
        right_joint = _joint(rank, middle, receivers, has_left=is_middle, has_right=rank in receivers)
        lines.append(tail + left_joint + center + right_joint + arrow)
    return lines


def _table(*columns: str) -> Table:
    table = table_of("rank", *columns, words=1 + len(columns))
    table.columns[0].justify = "right"
    return table


def _column_width(console: Console, used_width: int, columns: int) -> int:
    """Return the width in characters of one column of numbers."""
    return max(8, (console.width - len("rank") - used_width - 2 * (columns + 2)) // columns)


def _joint(rank: int, middle: int, ends: Collection[int], *, has_left: bool, has_right: bool) -> str:
    """Return the character where a rank's line meets the vertical line, which connects the middle with all ends."""
    top, bottom = min(middle, *ends), max(middle, *ends)
    up, down = top < rank <= bottom, top <= rank < bottom
    return BOXES["L" * has_left + "R" * has_right + "U" * up + "D" * down]
