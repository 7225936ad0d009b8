"""`shardlab collectives show NAME`: what a collective does to every rank's tensor, on real processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from shardlab.cli.console import print_json, stdout_console
from shardlab.cli.options import Count, Flag
from shardlab.errors import unknown
from shardlab.program import Reduction, UserError
from shardlab.train.launch_environment import require_port

if TYPE_CHECKING:
    from shardlab.execute.show import Shown

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
"""Every collective, and a message between two ranks, with what each rank then has."""

REDUCING = {"reduce", "all_reduce"}
"""Collectives that take --reduction."""

SAME = {
    "all_reduce": ("reduce_scatter", "all_gather"),
    "broadcast": ("scatter", "all_gather"),
    "reduce": ("reduce_scatter", "gather"),
}
"""By collective, two others that in a row do the same, if it sums."""


@dataclass(frozen=True)
class Collectives:
    """Show what a collective does: the tensor of every rank before and after, on real processes.

    Collectives: broadcast, scatter, gather, reduce, all_reduce, all_gather, reduce_scatter, all_to_all, barrier, send
    (or recv); or all of them, one after the other. If a collective is equal to two others in a row, these are run as
    well.
    """

    action: tyro.conf.Positional[Literal["show"]]
    """What to do."""

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
        self._want_ranks()
        if self.reduction != "sum" and not REDUCING.intersection(names):
            raise UserError(
                f"--reduction {self.reduction}: {names[0]} has no reduction; give it to reduce, all_reduce or all"
            )
        require_port(os.environ)
        from shardlab.cli.ranks import failures_as_exit
        from shardlab.execute.show import show_rank
        from shardlab.train.launch import run_ranks

        doubles = [SAME[name] for name in names if name in SAME and self.reduction == "sum"]
        cases = [*((name,) for name in names), *doubles]
        with failures_as_exit():
            shown = run_ranks(self.ranks, show_rank, cases, self.root, Reduction(self.reduction))
        if shown is None:  # a rank of an existing world, but not the one that reports
            return 0
        found = {each.steps: each for each in shown}
        if self.json:
            print_json(self._as_json(names, found))
        else:
            self._print(names, found)
        return 0 if all(same_as(found, name) is not False for name in names) else 1

    def _names(self) -> list[str]:
        if self.name == "all":
            return list(NAMES)
        name = self.name.replace("-", "_")
        name = "send" if name == "recv" else name
        if name not in NAMES:
            raise unknown("collective", self.name, [*NAMES, "all"])
        return [name]

    def _want_ranks(self) -> None:
        if not 2 <= self.ranks <= 99:
            raise UserError(f"--ranks {self.ranks}: collectives are shown on 2 to 99 ranks; give --ranks 4")
        if not 0 <= self.root < self.ranks:
            raise UserError(f"--root {self.root}: there are ranks 0-{self.ranks - 1}; give one of them")

    def _says(self, name: str) -> str:
        return NAMES[name].format(by=self.reduction)

    def _as_json(self, names: list[str], found: dict[tuple[str, ...], Shown]) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "root": self.root,
            "reduction": self.reduction,
            "collectives": [
                {"name": name, "says": self._says(name), "before": found[name,].before, "after": found[name,].after}
                for name in names
            ],
            "same": [
                {"name": name, "steps": SAME[name], "tensors": found[SAME[name]].tensors, "same": same_as(found, name)}
                for name in names
                if same_as(found, name) is not None
            ],
        }

    def _print(self, names: list[str], found: dict[tuple[str, ...], Shown]) -> None:
        from shardlab.cli.collectives_table import print_same, print_shown

        console = stdout_console()
        if names != ["barrier"]:
            unit = 10 if self.ranks <= 10 else 100
            console.print(f"[dim]{unit} and {unit + 1} are elements 0 and 1 of rank 1's tensor; - is no tensor[/]\n")
        for name in names:
            by = self.reduction if name in REDUCING else "sum"
            print_shown(console, found[name,], self._says(name), self.root, by)
            if (same := same_as(found, name)) is not None:
                print_same(console, name, found[SAME[name]], same=same)


def same_as(found: dict[tuple[str, ...], Shown], name: str) -> bool | None:
    """Whether two others in a row gave on every rank what a collective gave; None if that was not run."""
    double = found.get(SAME.get(name, ()))
    return None if double is None else double.after == found[name,].after
