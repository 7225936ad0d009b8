"""Memory that a rank has freed is used again as it is."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

FAULTS = """
import resource, sys, torch
from shardlab.train.heap import set_heap

if sys.argv[1] == "keep":
    set_heap()
def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [torch.ones(2**18) for _ in range(24)]  # 24 MiB, as a forward pass keeps activations
    while held:
        held.pop()  # from the last to the first, as a backward pass frees them
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_a_second_step_finds_its_memory_where_the_first_one_left_it() -> None:
    """Without it, the test's own premise: pages are faulted in again.

    How a process's heap happens to lie may cost one block of the 24 on either side, so a few processes are asked.
    """
    assert any(faults("keep") < 100 for _ in range(6))
    assert any(faults("no") > 100 for _ in range(6))


def faults(word: str) -> int:
    """Pages that a process's third step touches for the first time."""
    asked = [sys.executable, "-c", FAULTS, word]
    return int(subprocess.run(asked, check=True, capture_output=True, text=True).stdout)
