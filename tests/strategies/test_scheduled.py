"""The program that follows a schedule."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.program import UserError, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.scheduled import scheduled
from shardlab.strategies.schedules import Action, Backward, Forward, Schedule


@given(
    st.sampled_from(["1f1b", "interleaved-1f1b", "breadth-first"]),
    st.integers(1, 4),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_any_number_of_microbatches_and_layers_passes_all_channel_models(
    name: str, ranks: int, more_layers: int, microbatches: int
) -> None:
    entry = STRATEGIES[name]
    checked = check(trace(entry.program, entry.mesh(ranks), ranks + more_layers, microbatches))
    assert checked.backends() == ["gloo", "nccl"]


def test_too_few_layers_are_one_sentence() -> None:
    with pytest.raises(UserError, match="3 layers do not reach 4 pipeline ranks"):
        trace(STRATEGIES["1f1b"].program, 4, 3, 4)


def backwards(rank: int, ranks: int, microbatches: int, stages_per_rank: int) -> Iterator[Action]:
    yield Backward(rank, 0)
    yield Forward(rank, 0)


def test_a_schedule_that_waits_for_itself_is_one_sentence() -> None:
    with pytest.raises(UserError, match=r"cannot go on: each rank's next action waits for a later one \(Backward"):
        trace(scheduled(Schedule("backwards", backwards)), 2, 2, 1)
