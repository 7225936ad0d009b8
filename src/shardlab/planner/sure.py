"""How sure a prediction is: errors of the same recipe and device on published runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from shardlab.program.files import packaged
from shardlab.rules.pieces import counted


@dataclass(frozen=True)
class RunErrors:
    """Errors of predicted step times, of published runs of one kind.

    Attributes:
        recipe, device: of the runs ("": of several).
        runs: how many.
        mean, worst: of the sizes of their errors, predicted over measured, less 1.
        what: the runs.
    """

    recipe: str
    device: str
    runs: int
    mean: float
    worst: float
    what: str = "published run"

    def __str__(self) -> str:
        """Words for these runs: `± 3.6 % over 26 published runs of megatron-core on h100`."""
        whose = f" of {self.recipe}" if self.recipe else ""
        where = f" on {self.device}" if self.device else ""
        return f"± {self.mean:.1%} over {counted(self.runs, self.what)}{whose}{where}, at most {self.worst:.0%}"


ON_PROFILES = RunErrors("", "two CPU cores", 34, 0.061, 0.192, "step")
"""Errors on a machine that is planned by its own profile: the steps of runs 7 and 8 of docs/agreement.md."""


@cache
def known_errors() -> tuple[RunErrors, ...]:
    """Errors of every recipe on every device of which there are published runs."""
    return tuple(RunErrors(**row) for row in packaged("planner/errors.toml")["error"])


def errors_of(recipe: str, device: str) -> RunErrors:
    """Errors of the runs that are most like a step: of its recipe and device, its device, its recipe, or all."""
    tries: tuple[tuple[Callable[[RunErrors], bool], str, str], ...] = (
        (lambda row: (row.recipe, row.device) == (recipe, device), recipe, device),
        (lambda row: row.device == device, "", device),
        (lambda row: row.recipe == recipe, recipe, ""),
        (lambda _: True, "", ""),
    )
    for fits, of_recipe, on_device in tries:
        if found := [row for row in known_errors() if fits(row)]:
            runs = sum(row.runs for row in found)
            mean = sum(row.runs * row.mean for row in found) / runs
            return RunErrors(of_recipe, on_device, runs, mean, max(row.worst for row in found))
    raise AssertionError("the table has rows")
