"""Seconds of forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.execute.executor import Executor
from shardlab.execute.recording import BACKWARD, FORWARD, ClockOffset, ComputeClock, clock_offset, estimate
from shardlab.execute.settings import Settings
from shardlab.language import OpKind
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.data.corpus import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks


@pytest.fixture
def executor() -> Executor:
    job = Job("single", 1, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2)
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, 2, 0)
    return Executor(job.checked(), 0, job.cut, batches, Settings())


@pytest.mark.parametrize(("slow", "expected"), [(OpKind.FORWARD, 0), (OpKind.BACKWARD, 1), (OpKind.UPDATE, None)])
def test_an_op_counts_where_it_belongs(
    executor: Executor, slow: OpKind, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])
    places = [at for at, op in enumerate(executor.state.tape) if op.kind is slow]
    assert places
    for at in places:
        plain = executor.instructions[at]
        executor.instructions[at] = lambda plain=plain: (now.append(now.pop() + 1), plain())[1]
    clock = ComputeClock(executor)
    executor.step()
    clock.read()
    executor.step()
    seconds = clock.read()
    for direction, took in enumerate(seconds):
        assert took == (len(places) if direction == expected else 0)
    assert clock.read() == (0.0, 0.0)


def test_every_kind_that_computes_a_pass_is_counted_once() -> None:
    assert not FORWARD & BACKWARD
    assert {kind for kind in OpKind if kind.value.startswith(("backward", "attend_backward"))} == BACKWARD


# Clocks of other processes, from messages that go there and back.


WAYS = st.tuples(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2))
"""Seconds there, and back."""


@given(trips=st.lists(WAYS, min_size=1, max_size=8), lead=st.floats(-1e3, 1e3))
def test_an_estimate_is_no_further_from_the_truth_than_its_bound(trips: list[tuple[float, float]], lead: float) -> None:
    rounds = [(forth + back, lead + forth - (forth + back) / 2) for forth, back in trips]
    offset = estimate(rounds)
    assert offset.bound == min(forth + back for forth, back in trips) / 2
    assert abs(offset.seconds - lead) <= 2 * offset.bound + 1e-9
    if offset.seconds:
        assert abs(offset.seconds - lead) <= offset.bound + 1e-9


def offset(rank: int) -> ClockOffset:
    return clock_offset(rank, 2, torch.device("cpu"))


@pytest.mark.starts_ranks
def test_processes_of_one_host_have_one_clock(ranks: Callable[[int], Ranks]) -> None:
    first, second = ranks(2).call(offset)
    assert first == ClockOffset(0.0, 0.0)
    assert second.seconds == 0.0
    assert second.bound > 0
