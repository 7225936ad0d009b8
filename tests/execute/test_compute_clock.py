"""Seconds of forward and backward passes."""

from __future__ import annotations

import pytest

from shardlab.execute import Executor, Settings
from shardlab.execute.compute_clock import BACKWARD, FORWARD, ComputeClock
from shardlab.models import GPT
from shardlab.program import OpKind
from shardlab.train.data import Batches, Corpus
from shardlab.train.job import Job


@pytest.fixture
def executor() -> Executor:
    job = Job("single", 1, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2)
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, 2, 0)
    return Executor(job.checked(), 0, job.cut, batches, Settings())


@pytest.mark.parametrize(("slow", "which"), [(OpKind.FORWARD, 0), (OpKind.BACKWARD, 1), (OpKind.UPDATE, None)])
def test_an_op_counts_where_it_belongs(
    executor: Executor, slow: OpKind, which: int | None, monkeypatch: pytest.MonkeyPatch
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
        assert took == (len(places) if direction == which else 0)
    assert clock.read() == (0.0, 0.0)


def test_every_kind_that_computes_a_pass_is_counted_once() -> None:
    assert not FORWARD & BACKWARD
    assert {kind for kind in OpKind if kind.value.startswith(("backward", "attend_backward"))} == BACKWARD
