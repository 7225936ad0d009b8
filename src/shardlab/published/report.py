"""How far predictions are from measurements: mean, median, worst and bias, by source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, median
from typing import Protocol

from shardlab.published.outcomes import Figure, Outcome


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some predictions, as shares of what was measured.

    Attributes:
        count: how many.
        mean, median, worst: of their sizes.
        bias: their mean, signs kept: above zero, predictions are too large.
    """

    count: int
    mean: float
    median: float
    worst: float
    bias: float

    @classmethod
    def of(cls, errors: Sequence[float]) -> ErrorSummary:
        """Sum up some errors, one at least."""
        sizes = [abs(error) for error in errors]
        return cls(len(errors), mean(sizes), median(sizes), max(sizes), mean(errors))


def by_source(outcomes: Sequence[Outcome], figure: Figure) -> dict[str, ErrorSummary]:
    """The errors of each source that has any, in the order of the file, and then of all together."""
    grouped: dict[str, list[float]] = defaultdict(list)
    for outcome in outcomes:
        if (error := outcome.error(figure)) is not None:
            grouped[outcome.source].append(error)
    if grouped:
        grouped["all"] = [error for errors in grouped.values() for error in errors]
    return {title: ErrorSummary.of(errors) for title, errors in grouped.items()}


def worst_of(outcomes: Sequence[Outcome], figure: Figure, count: int) -> list[tuple[float, Outcome]]:
    """The runs whose predictions are farthest off, with their errors, the worst first."""
    found = [(error, outcome) for outcome in outcomes if (error := outcome.error(figure)) is not None]
    return sorted(found, key=lambda each: -abs(each[0]))[:count]


def misjudged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs that are said to fit and did not, or that ran and are said not to fit."""
    return [
        outcome
        for outcome in outcomes
        if outcome.prediction is not None and outcome.prediction.fits is outcome.measured.out_of_memory
    ]


class Assuming(Protocol):
    """A prediction of a run, with what it takes for granted."""

    @property
    def id(self) -> str: ...

    @property
    def assumed(self) -> tuple[str, ...]: ...


def assumed_by(outcomes: Sequence[Assuming]) -> dict[str, list[str]]:
    """List what predictions take for granted, with the ids of the runs that leave it open."""
    runs: dict[str, list[str]] = {}
    for outcome in outcomes:
        for phrase in outcome.assumed:
            runs.setdefault(phrase, []).append(outcome.id)
    return runs
