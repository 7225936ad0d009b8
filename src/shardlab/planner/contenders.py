"""Plans that take turns before a run begins: the one that is predicted fastest, and those that may be faster."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.planner.chosen import PlanChoice
from shardlab.planner.experiments import experiments
from shardlab.planner.found import PlanOutcome

MOST = 6
"""How many take turns at most."""

STEPS = 7
"""How many steps each takes at least: one at first, and two in each of three rounds."""


def contenders(choice: PlanChoice, seconds: float) -> list[PlanOutcome]:
    """Find what is worth measuring before a run: the plan that is predicted fastest, and then those that may be faster.

    Args:
        choice: what was planned, with beliefs; nothing was measured.
        seconds: that their steps may take; with too little the first plan is alone. All lie in memory at once.
    """
    assert choice.beliefs is not None, "it was asked what may be measured"
    found = [each.outcome for each in experiments(choice.beliefs, MOST)]
    while len(found) > 1 and not (
        least_seconds(found) <= seconds and sum(each.forecast.memory.total for each in found) <= choice.problem.room
    ):
        found.pop()
    return found


def least_seconds(found: Sequence[PlanOutcome]) -> float:
    """Seconds of the least steps that contenders take, as predicted."""
    return STEPS * sum(each.seconds for each in found)
