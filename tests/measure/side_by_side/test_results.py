"""Ratios are of neighbouring steps; losses that differ, or are no numbers, do not agree."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from shardlab.measure.side_by_side.results import Compared, Side, spread_of

FOUND = Compared(
    ours=Side([1.0, 10.0, 3.0], [0.5, 0.5, 0.5], 90),
    theirs=Side([2.0, 20.0, 6.0], [0.75, 0.75, 0.75], 100),
    floor=Side([0.5, 5.0, 1.5], [0.25, 0.25, 0.25], 50),
    our_losses=[4.0, 3.0],
    their_losses=[4.0, 3.0],
)


def test_ratios_are_of_neighbouring_steps_so_that_noise_cancels() -> None:
    assert FOUND.ratio == (0.5, 0.5, 0.5)
    assert FOUND.ours.over(FOUND.floor) == (2.0, 2.0, 2.0)


def test_a_step_is_what_the_floor_computes_overhead_and_waiting() -> None:
    assert FOUND.ours.parts(FOUND.floor) == (0.25, 0.25, 2.5)
    assert FOUND.theirs.parts(FOUND.floor) == (0.25, 0.5, 5.25)


def test_memory_is_a_ratio_of_peaks() -> None:
    assert FOUND.memory == 0.9


@pytest.mark.parametrize(
    ("losses", "agrees"),
    [
        ([4.0, 3.0], True),
        ([4.0, 3.0002], True),
        ([4.0, 3.001], False),
        ([4.0, math.nan], False),
        ([math.nan] * 2, False),
    ],
)
def test_losses_agree_to_one_in_ten_thousand_or_no_time_counts(losses: list[float], agrees: bool) -> None:
    assert replace(FOUND, our_losses=losses).agrees is agrees


def test_one_figure_has_no_spread() -> None:
    assert spread_of([3.0]) == (3.0, 3.0, 3.0)
