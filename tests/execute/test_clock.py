"""Clocks of other processes, from messages that go there and back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.clock import ClockOffset, clock_offset, estimate
from tests.support.ranks import Ranks

WAYS = st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))
"""Seconds there, and back."""


@given(ways=st.lists(WAYS, min_size=1, max_size=8), lead=st.floats(-1e3, 1e3))
def test_an_estimate_is_no_further_from_the_truth_than_its_bound(ways: list[tuple[float, float]], lead: float) -> None:
    rounds = [(there + back, lead + there - (there + back) / 2) for there, back in ways]
    found = estimate(rounds)
    assert found.bound == min(there + back for there, back in ways) / 2
    assert abs(found.seconds - lead) <= 2 * found.bound + 1e-9
    if found.seconds:
        assert abs(found.seconds - lead) <= found.bound + 1e-9


def offset(rank: int) -> ClockOffset:
    return clock_offset(rank, 2, torch.device("cpu"))


@pytest.mark.xdist_group("ranks")
def test_processes_of_one_host_have_one_clock(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(offset)
    assert first == ClockOffset(0.0, 0.0)
    assert second.seconds == 0.0
    assert second.bound > 0
