"""Lines through what was measured, and which of them are not to be relied on."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.measure.lines import NO_LATENCY, NO_SLOPE, ONE_SIZE, SCATTERED, fit_line

SIZES = [1024 * 4**step for step in range(9)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-10, 1e-8))
def test_a_clean_line_is_found_and_not_doubted(alpha: float, beta: float) -> None:
    fitted = fit_line({size: alpha + beta * size for size in SIZES})
    assert fitted.line.seconds(SIZES[4]) == pytest.approx(alpha + beta * SIZES[4], rel=1e-6)
    assert fitted.doubt is None


@given(st.lists(st.floats(1e-6, 1e-2), min_size=2, max_size=9))
def test_whatever_was_measured_larger_sizes_take_longer(seconds: list[float]) -> None:
    found = dict(zip(SIZES, seconds, strict=False))
    fitted = fit_line(found)
    assert fitted.line.alpha >= 0
    assert fitted.line.beta > 0


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 1e-3], [2e-3, 1e-3, 1e-3], [1e-3, 1.3e-3, 1.05e-3]])
def test_where_size_adds_nothing_bandwidth_is_that_of_the_largest_and_doubted(seconds: list[float]) -> None:
    fitted = fit_line(dict(zip((1024, 4096, 16384), seconds, strict=True)))
    assert fitted.line.beta == pytest.approx(seconds[-1] / 16384)
    assert fitted.line.seconds(1024) > 0.5e-3
    assert fitted.doubt == NO_SLOPE


def test_scattered_points_are_doubted() -> None:
    fitted = fit_line({size: (1e-4 + 1e-8 * size) * 4.0 ** (i % 3) for i, size in enumerate(SIZES)})
    assert fitted.doubt == SCATTERED


def test_a_line_without_latency_is_doubted() -> None:
    fitted = fit_line({1 << 20: 1e-3, 4 << 20: 5e-3})
    assert fitted.doubt == NO_LATENCY


def test_one_size_is_told_as_measured_and_doubted() -> None:
    fitted = fit_line({1 << 20: 1e-3})
    assert fitted.line.seconds(1 << 20) == pytest.approx(1e-3)
    assert fitted.doubt == ONE_SIZE


def test_a_barrier_is_latency_alone() -> None:
    fitted = fit_line({0: 1e-3})
    assert (fitted.line.alpha, fitted.line.beta, fitted.doubt) == (1e-3, 0.0, None)
