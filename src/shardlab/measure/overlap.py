"""What a collective costs a step that computes, from rounds of both: what is not hidden, and how ranks come apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from shardlab.measure.points import OverlapPoint
from shardlab.program.lag import Lag


def fit_contention(points: Sequence[OverlapPoint]) -> float:
    """Seconds that compute loses for each second of communication beside it: the median over the third of the points
    that have most bytes, since of the others little but the start is seen."""
    ascending = sorted(points, key=lambda point: point.bytes)
    return median(point.contention for point in ascending[2 * len(points) // 3 :])


def fit_lag(points: Sequence[OverlapPoint]) -> Lag:
    """How ranks come apart: by a share of what they compute, which short rounds tell, and no further than long ones.

    What is lost beside compute, more than contention says, is the part of it that is not hidden.
    """
    ascending = sorted(points, key=lambda point: point.compute)
    middle = len(ascending) // 2
    short, long = ascending[: middle or 1], ascending[middle:]
    share = median(point.lag / point.compute for point in short)
    lag = Lag(min(1.0, share), median(point.lag for point in long))  # a rank waits until the other one stops, at most
    contention = fit_contention(points)
    parts = [
        (point.lost - contention * min(point.compute, point.alone)) / lag.seconds(point.compute)
        for point in points
        if lag.seconds(point.compute)
    ]
    return replace(lag, hidden=min(1.0, max(0.0, median(parts)))) if parts else lag
