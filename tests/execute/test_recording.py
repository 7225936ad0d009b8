"""The host's stopwatch knows when a communication was over, however late the rank waits for it."""

# pyright: reportUnknownMemberType=false, reportDeprecated=false
# torch leaves some of its annotations out, and marks a function as deprecated that is not.

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from shardlab.execute.recording import HostStopwatch
from tests.support.processes import PATIENCE
from tests.support.ranks import Ranks

pytestmark = pytest.mark.starts_ranks


def watched(rank: int) -> list[tuple[str, bool, bool]]:
    """Return for each communication whether its end is known before any wait, and lies before it."""
    stopwatch, observations = HostStopwatch(), list[tuple[str, bool, bool]]()
    whole, piece = torch.ones(64), torch.empty(32)
    starts: dict[str, Callable[[], Any]] = {
        "all_reduce": partial(dist.all_reduce, whole, async_op=True),
        "reduce_scatter": partial(dist.reduce_scatter_tensor, piece, whole, async_op=True),
        "message": partial(dist.isend, whole, 1) if rank == 0 else partial(dist.irecv, whole, 0),
    }
    for name, start in starts.items():
        wait, end_of = stopwatch.watch(start(), batched=False)
        until = time.perf_counter() + PATIENCE
        while end_of() is None and time.perf_counter() < until:
            time.sleep(0.001)
        waited, end = time.perf_counter(), end_of()
        wait()
        observations.append((name, end is not None, end is not None and end <= waited))
    return observations


def test_the_end_of_a_communication_is_known_without_waiting_for_it(ranks: Callable[[int], Ranks]) -> None:
    for observations in ranks(2).call(watched):
        assert [name for name, is_known, is_before in observations if not (is_known and is_before)] == []


class Lost:
    """A work that fails, and has no future."""

    def get_future(self) -> Any:
        raise RuntimeError("Work::getFuture not implemented.")

    def wait(self) -> None:
        raise RuntimeError("Connection closed by peer")


def test_a_failure_is_heard_where_the_rank_waits_and_has_no_end() -> None:
    wait, end_of = HostStopwatch().watch(Lost(), batched=False)
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        wait()
    assert end_of() is None


def test_threads_that_wait_are_used_again() -> None:
    class Done(Lost):
        def wait(self) -> None:
            pass

    stopwatch, thread_count = HostStopwatch(), threading.active_count()
    for _ in range(50):
        wait, end_of = stopwatch.watch(Done(), batched=False)
        wait()
        time.sleep(0.002)
        assert end_of() is not None
    assert threading.active_count() - thread_count < 10
