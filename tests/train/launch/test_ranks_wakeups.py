"""A thread that wakes up waits until the core is free."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.train.launch.ranks import restore_wakeups, run_ranks, set_wakeups

if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
    pytest.skip("other systems schedule otherwise, or somebody has chosen how", allow_module_level=True)


def policies(rank: int, device: torch.device) -> dict[str, int]:
    """Return the scheduling policies of a rank's own thread and of gloo's, by name."""
    dist.all_reduce(torch.zeros(1))  # or gloo's may have gone
    threads = [Path("/proc/self/task", name) for name in os.listdir("/proc/self/task")]
    policy_by_thread = {
        (thread / "comm").read_text().strip(): os.sched_getscheduler(int(thread.name)) for thread in threads
    }
    return {name: policy for name, policy in policy_by_thread.items() if "gloo" in name} | {
        "own": os.sched_getscheduler(0)
    }


@pytest.mark.starts_ranks
def test_no_thread_of_a_rank_takes_the_core_from_another() -> None:
    policy_by_thread = run_ranks(2, policies)
    assert len(policy_by_thread) > 1
    assert set(policy_by_thread.values()) == {os.SCHED_BATCH}


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


# Memory that a rank has freed is used again as it is.


FAULTS = """
import resource, torch
from shardlab.train.launch.ranks import set_heap

def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**18) for _ in range(24)]  # 24 MiB, as a forward pass keeps activations
    while held:
        held.pop()  # from the last to the first, as a backward pass frees them
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
for prepare in (bool, set_heap):
    prepare()
    faults(), faults()
    print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_second_step_finds_its_memory_where_the_first_one_left_it() -> None:
    """Without it, the test's own premise: pages are faulted in again.

    How a process's heap happens to lie may cost one block of the 24 on either side, so a few processes are asked.
    """
    assert any(plain > 100 > heap_pages for plain, heap_pages in (faults() for _ in range(6)))


def faults() -> tuple[int, int]:
    """Pages that a process's third step touches for the first time, before and after `set_heap`."""
    asked = [sys.executable, "-c", FAULTS]
    plain, heap_pages = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.split()
    return int(plain), int(heap_pages)
