"""How sure a prediction is: errors on published runs that its constants were not fitted to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from shardlab.program.files import packaged
from shardlab.rules.pieces import counted

FEW = 5
"""Runs of a kind below which those of a wider kind are taken."""

NAMED = 3
"""Recipes that are named at most; more are counted."""


@dataclass(frozen=True)
class RunErrors:
    """Errors of predicted step times, of runs of one kind.

    Attributes:
        recipes: that ran them (none: they are no published runs).
        device: of the runs ("": of several).
        runs: how many.
        mean, worst: of the sizes of their errors, predicted over measured, less 1.
        what: the runs.
    """

    recipes: tuple[str, ...]
    device: str
    runs: int
    mean: float
    worst: float
    what: str = "published run"

    def __str__(self) -> str:
        """Words for these runs: `± 13.1% over 27 published runs of llm-foundry on h100, ..., at most 38%`."""
        where = f" on {self.device}" if self.device else ""
        names = self.recipes if len(self.recipes) <= NAMED else (counted(len(self.recipes), "recipe"),)
        whose = f" of {', '.join(names)}" if names else ""
        unseen = ", each source left out of the fit" if self.recipes else ""
        size = f"± {self.mean:.1%} over {counted(self.runs, self.what)}"
        return f"{size}{whose}{where}{unseen}, at most {self.worst:.0%}"


ON_PROFILES = RunErrors((), "two CPU cores", 34, 0.061, 0.192, "step")
"""Errors on a machine that is planned by its own profile: the steps of runs 7 and 8 of docs/agreement.md."""


@cache
def known_errors() -> tuple[RunErrors, ...]:
    """Errors of every recipe on every device of which there are published runs."""
    return tuple(
        RunErrors((row["recipe"],), row["device"], row["runs"], row["mean"], row["worst"])
        for row in packaged("planner/errors.toml")["error"]
    )


def errors_of(recipe: str, device: str) -> RunErrors:
    """Errors of the runs that are most like a step: of its recipe on its device; of all recipes on its device, if those
    are few; of all, if those are few too."""
    known = known_errors()
    here = [row for row in known if row.device == device]
    own = [row for row in here if row.recipes == (recipe,)]
    some = next((rows for rows in (own, here) if sum(row.runs for row in rows) >= FEW), known)
    runs = sum(row.runs for row in some)
    return RunErrors(
        tuple(sorted({name for row in some for name in row.recipes})),
        "" if some is known else device,
        runs,
        sum(row.runs * row.mean for row in some) / runs,
        max(row.worst for row in some),
    )
