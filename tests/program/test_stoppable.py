"""What a user's program may take its time for, and what it may not."""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path

import pytest

from shardlab.program import Rank, trace
from shardlab.program.bounds import bounded
from shardlab.program.stoppable import Stalled, Stoppable, run_stoppable
from shardlab.strategies.ddp import ddp
from tests.support.refusing import refuses
from tests.support.waiting import until


def spend(seconds: float) -> None:
    """CPU time of this thread."""
    start = time.thread_time()
    while time.thread_time() - start < seconds:
        pass


def test_an_error_of_the_work_is_raised_as_it_is() -> None:
    error = TimeoutError("mine")

    def work() -> None:
        raise error

    with pytest.raises(TimeoutError, match="mine") as caught:
        run_stoppable(work, 5, lambda _: None)
    assert caught.value is error


def test_the_time_counts_for_each_op_and_not_for_all() -> None:
    async def slow(rank: Rank) -> None:
        for l in rank.layers:
            spend(0.3)
            rank.weights[l], rank.opt_states[l] = rank.load_weights(l)

    with bounded(seconds=1):
        trace(slow, 2, 4, 2)
    with bounded(seconds=0.1), refuses("stalled", error=Stalled):
        trace(slow, 2, 4, 2)
    with bounded(seconds=math.inf):
        trace(slow, 1, 1, 1)


def test_a_program_that_sleeps_takes_no_cpu_time() -> None:
    async def sleeps(rank: Rank) -> None:
        time.sleep(0.5)
        await ddp(rank)

    with bounded(seconds=0.1):
        trace(sleeps, 2, 2, 2)


def test_a_program_that_has_ended_has_no_clock_and_that_is_no_error() -> None:
    program = Stoppable(lambda: spend(0.01))
    program.start()
    program.join()
    if hasattr(time, "pthread_getcpuclockid"):
        until(lambda: program.cpu_seconds() == 0)  # its thread ends soon after the join


def test_an_import_may_take_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "takes_long.py").write_text("from tests.program.test_stoppable import spend\nspend(0.8)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    async def imports(rank: Rank) -> None:
        import takes_long  # pyright: ignore[reportMissingImports]

        del takes_long
        await ddp(rank)

    with bounded(seconds=0.2):
        trace(imports, 2, 2, 2)
    assert "takes_long" in sys.modules


def test_what_was_stopped_does_not_go_on() -> None:
    turns = [0]

    async def endless(rank: Rank) -> None:
        while True:
            turns[0] += 1

    with bounded(seconds=0.2), pytest.raises(Stalled):
        trace(endless, 2, 2, 2)
    before = turns[0]
    time.sleep(0.1)
    assert turns[0] == before > 0
