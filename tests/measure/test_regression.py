"""Fits find the constants that made the points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.measure.regression import FitErrors, alpha_beta, fit_relative, nonnegative_least_squares

SIZES = [1024 * 4**step for step in range(9)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8))
def test_latency_and_bandwidth_are_found_again(alpha: float, beta: float) -> None:
    found = alpha_beta(SIZES, [alpha + beta * size for size in SIZES])
    for size in SIZES:
        assert found[0] + found[1] * size == pytest.approx(alpha + beta * size, rel=1e-6)


@given(st.floats(1e-5, 1e-3), st.floats(1e-10, 1e-8), st.integers(0, len(SIZES) - 1))
def test_one_point_on_a_busy_machine_moves_them_little(alpha: float, beta: float, late: int) -> None:
    seconds = [alpha + beta * size for size in SIZES]
    found = alpha_beta(SIZES, [10 * time if i == late else time for i, time in enumerate(seconds)])
    others = [i for i in range(len(SIZES)) if i != late]
    errors = FitErrors.between([found[0] + found[1] * SIZES[i] for i in others], [seconds[i] for i in others])
    assert errors.median < 0.1


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """In seconds, the error at 64 MB would be all that matters."""
    alpha, _ = alpha_beta([*SIZES, 64 << 20], [*(1e-4 + 1e-9 * size for size in SIZES), 0.08])
    assert alpha == pytest.approx(1e-4, rel=0.2)


def test_one_size_alone_is_all_latency() -> None:
    assert alpha_beta([0, 0, 0], [1.0, 2.0, 9.0]) == (2.0, 0.0)


def systems(rows: int, columns: int) -> st.SearchStrategy[tuple[list[list[float]], list[float]]]:
    numbers = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))
    line = st.lists(numbers, min_size=columns, max_size=columns)
    return st.tuples(st.lists(line, min_size=rows, max_size=rows), st.lists(numbers, min_size=rows, max_size=rows))


@given(systems(6, 3))
def test_nonnegative_least_squares_meets_the_conditions_of_an_optimum(
    system: tuple[list[list[float]], list[float]],
) -> None:
    """Karush, Kuhn and Tucker's: nothing below 0, and no way down: flat where positive, uphill where 0."""
    matrix, target = np.array(system[0]), np.array(system[1])
    x = nonnegative_least_squares(matrix, target)
    uphill = matrix.T @ (matrix @ x - target)
    scale = 1 + np.abs(matrix).sum() * (1 + np.abs(target).max() + np.abs(matrix @ x).max())
    assert (x >= 0).all()
    assert (uphill >= -1e-8 * scale).all()
    assert (np.abs(uphill[x > 0]) <= 1e-8 * scale).all()


@given(st.lists(st.sampled_from([0.0, 1e-6, 3e-5, 2e-4]), min_size=4, max_size=4))
def test_constants_of_any_scale_are_found_again(constants: list[float]) -> None:
    """Launches are in the order of 1e-5, seconds for each byte in that of 1e-10."""
    truth = np.array(constants) * np.array([1, 1, 1e-5, 1e-6]) + np.array([1e-6, 0, 0, 0])
    rng = np.random.default_rng(0)
    matrix = rng.integers(1, 9, (40, 4)) * 10.0 ** rng.integers(0, 3, (40, 4)) * np.array([1, 1, 1e5, 1e6])
    found = fit_relative(matrix, matrix @ truth)
    assert matrix @ found == pytest.approx(matrix @ truth, rel=1e-6)


def test_errors_are_relative_to_what_was_measured() -> None:
    assert FitErrors.between([1.0, 3.0, 4.0], [1.0, 2.0, 5.0]) == FitErrors(0.2, 0.5, 3)
