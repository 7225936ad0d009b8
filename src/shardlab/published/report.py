"""How far predictions are from measurements: mean, median, worst and bias, by source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import mean, median

from shardlab.published import words
from shardlab.published.outcomes import Outcome


@dataclass(frozen=True)
class ErrorSummary:
    """Errors of some predictions, as shares of what was measured.

    Attributes:
        count: how many.
        mean, median, worst: of their sizes.
        bias: their mean, signs kept: above zero, predictions are too large.
        worst_id: whose is the worst.
    """

    count: int
    mean: float
    median: float
    worst: float
    bias: float
    worst_id: str


def errors_of(errors: Sequence[tuple[float, str]]) -> ErrorSummary | None:
    """Of (error, id) pairs; None of none."""
    if not errors:
        return None
    sizes = [abs(error) for error, _ in errors]
    worst = max(range(len(errors)), key=sizes.__getitem__)
    return ErrorSummary(
        len(errors), mean(sizes), median(sizes), sizes[worst], mean([error for error, _ in errors]), errors[worst][1]
    )


def title_of(source: str) -> str:
    """How a table calls a source; itself where no name is known."""
    return words.read("source", source).get("title", source or "unknown")


def by_source(
    outcomes: Sequence[Outcome], error: Callable[[Outcome], float | None] = lambda outcome: outcome.time_error
) -> dict[str, ErrorSummary]:
    """The errors of each source that has any, in the order of the file."""
    grouped: dict[str, list[tuple[float, str]]] = {}
    for outcome in outcomes:
        found = error(outcome)
        if found is not None:
            grouped.setdefault(title_of(outcome.source), []).append((found, outcome.id))
    made = {title: errors_of(errors) for title, errors in grouped.items()}
    return {title: errors for title, errors in made.items() if errors is not None}


def worst_of(
    outcomes: Sequence[Outcome], error: Callable[[Outcome], float | None], count: int
) -> list[tuple[float, Outcome]]:
    """The runs whose predictions are farthest off, with their errors, the worst first."""
    found = [(off, outcome) for outcome in outcomes if (off := error(outcome)) is not None]
    return sorted(found, key=lambda each: -abs(each[0]))[:count]


def misjudged(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Runs that are said to fit and did not, or that ran and are said not to fit."""
    return [
        outcome
        for outcome in outcomes
        if outcome.prediction is not None and outcome.prediction.fits is outcome.measured.out_of_memory
    ]


def assumed_by(outcomes: Sequence[Outcome]) -> dict[str, list[str]]:
    """What predictions take for granted, with the ids of the runs that leave it open."""
    runs: dict[str, list[str]] = {}
    for outcome in outcomes:
        for phrase in outcome.assumed:
            runs.setdefault(phrase, []).append(outcome.id)
    return runs
