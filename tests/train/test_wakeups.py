"""A thread that wakes up waits until the core is free."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.train.launch import run_ranks
from shardlab.train.wakeups import restore_wakeups, set_wakeups

if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
    pytest.skip("other systems schedule otherwise, or somebody has chosen how", allow_module_level=True)


def policies(rank: int, device: torch.device) -> dict[str, int]:
    """Those of a rank's own thread and of gloo's, by their names."""
    dist.all_reduce(torch.zeros(1))  # or gloo's may have gone
    threads = [Path("/proc/self/task", name) for name in os.listdir("/proc/self/task")]
    found = {(thread / "comm").read_text().strip(): os.sched_getscheduler(int(thread.name)) for thread in threads}
    return {name: policy for name, policy in found.items() if "gloo" in name} | {"own": os.sched_getscheduler(0)}


@pytest.mark.xdist_group("ranks")
def test_no_thread_of_a_rank_takes_the_core_from_another() -> None:
    found = run_ranks(2, policies)
    assert len(found) > 1
    assert set(found.values()) == {os.SCHED_BATCH}


def test_a_policy_that_somebody_has_chosen_stands() -> None:
    def turned(before: int) -> int:
        os.sched_setscheduler(0, before, os.sched_param(0))
        set_wakeups()
        return os.sched_getscheduler(0)

    assert in_a_thread(lambda: turned(os.SCHED_IDLE)) == os.SCHED_IDLE
    assert in_a_thread(lambda: turned(os.SCHED_OTHER)) == os.SCHED_BATCH


def test_threads_that_compute_together_wake_up_as_others_do() -> None:
    def turned() -> int:
        assert set_wakeups()
        restore_wakeups()
        return os.sched_getscheduler(0)

    assert in_a_thread(turned) == os.SCHED_OTHER


def in_a_thread(call: Callable[[], int]) -> int:
    """A policy is a thread's own, and ends with it."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result()
