"""The scale of losses in float16."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.loss_scale import CALM, FIRST, LossScale


def test_an_overflow_halves_the_scale_and_calm_doubles_it() -> None:
    scale = LossScale()
    scale.after(finite=False)
    assert scale.scale == FIRST / 2
    for _ in range(CALM - 1):
        scale.after(finite=True)
    assert scale.scale == FIRST / 2
    scale.after(finite=True)
    assert scale.scale == FIRST
    assert scale.calm == 0


@given(st.lists(st.booleans(), max_size=50))
def test_the_scale_is_a_power_of_two(steps: list[bool]) -> None:
    """So that it rounds nothing."""
    scale = LossScale()
    for finite in steps:
        scale.after(finite)
    assert scale.scale == FIRST / 2 ** steps.count(False)
