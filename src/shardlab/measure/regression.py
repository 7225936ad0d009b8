"""Fits by least squares of the relative error, so that what is short counts as much as what is long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import cast

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ROUNDS = 8
"""Rounds of reweighting. Fewer points change from round to round than a timing repeats."""


@dataclass(frozen=True)
class FitErrors:
    """How far predictions are from what was measured, relative to that."""

    median: float
    worst: float
    points: int

    @classmethod
    def between(cls, predicted: Sequence[float], measured: Sequence[float]) -> FitErrors:
        errors = [abs(p - m) / m for p, m in zip(predicted, measured, strict=True)]
        return cls(median(errors), max(errors), len(errors))


def nonnegative_least_squares(matrix: Array, target: Array) -> Array:
    """The x >= 0 that makes |matrix x - target| smallest (Lawson and Hanson 1974, chapter 23: the active set method).

    Args:
        matrix: (equations, unknowns); an unknown whose column is zero is 0.
        target: (equations,).

    Returns:
        (unknowns,).
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = 1  # columns of seconds per byte and of seconds differ by ten orders of magnitude
    triangle = cast(Array, np.linalg.qr(np.column_stack([matrix / scale, target]), mode="r"))
    scaled, target = triangle[:, :-1], triangle[:, -1]  # the same problem with only as many equations as unknowns
    x = np.zeros(scaled.shape[1])
    free = np.zeros(len(x), dtype=bool)
    tolerance = 1e-12 * max(1.0, float(np.abs(scaled.T @ target).max(initial=0)))
    for _ in range(10 * len(x)):
        slope = scaled.T @ (target - scaled @ x)
        slope[free] = -np.inf
        if not len(x) or slope.max() <= tolerance:
            break
        free[int(slope.argmax())] = True
        while True:
            trial = np.zeros(len(x))
            trial[free] = np.linalg.lstsq(scaled[:, free], target, rcond=None)[0]
            below = free & (trial <= 0)
            if not below.any():
                break
            step = float((x[below] / (x[below] - trial[below] + 1e-300)).min())  # as far as all stay positive
            x += step * (trial - x)
            free &= x > 1e-14 * max(1.0, float(x.max()))
            x[~free] = 0
        x = trial
    return x / scale


def fit_relative(matrix: Array, measured: Array) -> Array:
    """The x >= 0 for which `matrix @ x` comes closest to what was measured, relative to it.

    Timings on a busy machine have outliers, always upwards. So residuals beyond the usual one count by their size and
    not by its square (Huber 1964; iteratively reweighted).

    Args:
        matrix: (points, unknowns).
        measured: (points,), positive.
    """
    relative = matrix / measured[:, None]
    weights = np.ones(len(measured))
    x = np.zeros(matrix.shape[1])
    for _ in range(ROUNDS):
        x = nonnegative_least_squares(relative * weights[:, None], weights)
        off = np.abs(relative @ x - 1)
        usual = max(1.5 * float(np.median(off)), 1e-9)
        weights = np.sqrt(np.minimum(1, usual / np.maximum(off, 1e-300)))
    return x


def alpha_beta(sizes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """Latency in seconds and seconds per byte: time = alpha + beta x bytes (Hockney 1994).

    Args:
        sizes, seconds: what was measured, one of each at every size; with one size alone, all is latency.
    """
    if len(set(sizes)) < 2:
        return median(seconds), 0.0
    matrix = np.stack([np.ones(len(sizes)), np.asarray(sizes, dtype=float)], axis=1)
    alpha, beta = fit_relative(matrix, np.asarray(seconds, dtype=float))
    return float(alpha), float(beta)
