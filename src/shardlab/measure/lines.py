"""Latency and seconds per byte of every collective, and what speaks against them: a short bench on a busy machine
finds lines that cannot be."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from shardlab.hardware import AlphaBeta
from shardlab.hardware.measured import way_of
from shardlab.measure.points import CollectivePoint, Point
from shardlab.measure.regression import FitErrors, alpha_beta

TOLERATED = 1 / 3
"""A line that half of its points miss by more than this is doubted."""

ONE_SIZE = "one size alone does not tell latency from bandwidth; give a --max above --min"
NO_SLOPE = "larger sizes hardly took longer, so bandwidth is a guess; measure longer and larger: --seconds, --max"
SCATTERED = "half of the points miss the line by more than a third; measure longer: --seconds"
NO_LATENCY = "no latency was found, so small sizes are too cheap; measure longer and smaller: --seconds, --min"


@dataclass(frozen=True)
class FittedLine:
    """A line, how well it tells its points, and a sentence on why it should not be relied on, or None."""

    line: AlphaBeta
    errors: FitErrors
    doubt: str | None


def collective_seconds(points: Sequence[Point]) -> dict[tuple[str, int], dict[int, float]]:
    """Seconds of a collective, by (its name in a profile, ranks) and then by bytes."""
    found: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    for point in points:
        if isinstance(point, CollectivePoint):
            found[way_of(point.kind, point.bytes, point.ranks), point.ranks][point.bytes] = point.seconds
    return found


def fit_lines(points: Sequence[Point]) -> dict[tuple[str, int], FittedLine]:
    """The line of every collective and group size, through what `collective_seconds` has of it."""
    return {key: fit_line(found) for key, found in collective_seconds(points).items()}


def fit_line(found: Mapping[int, float]) -> FittedLine:
    """A line whose time depends on the size.

    Where sizes add less than the points scatter, their bandwidth was not found: then it is what the largest size shows,
    latency and all. That is less than there is, so that nothing larger is predicted to take no longer.

    Args:
        found: seconds by bytes; a barrier has none, and its line is latency alone.
    """
    line = AlphaBeta(*alpha_beta([*found], [*found.values()]))
    errors, largest = errors_of(line, found), max(found)
    doubt = None
    if largest and line.beta * largest <= errors.median * line.alpha:
        beta = found[largest] / largest
        line = AlphaBeta(max(0.0, median(seconds - beta * size for size, seconds in found.items())), beta)
        errors = errors_of(line, found)
        doubt = NO_SLOPE if len(found) > 1 else ONE_SIZE
    elif errors.median > TOLERATED:
        doubt = SCATTERED
    elif largest and line.alpha == 0:
        doubt = NO_LATENCY
    return FittedLine(line, errors, doubt)


def errors_of(line: AlphaBeta, found: Mapping[int, float]) -> FitErrors:
    """How far a line is from its points."""
    return FitErrors.between([line.seconds(size) for size in found], [*found.values()])
