"""Memory of this machine, and the limit that keeps a command from being killed."""

from __future__ import annotations

import sys

import pytest

from shardlab.common import memory
from shardlab.common.memory import MINIMUM_BYTES, available_memory, memory_limit, peak_memory, resident_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what is available")


def test_this_process_is_in_memory_and_there_is_some_left() -> None:
    assert min(resident_memory(), peak_memory()) > 0
    assert available_memory() is not None


def test_an_allocation_beyond_the_limit_fails_inside_of_the_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 0)
    with memory_limit(), pytest.raises(MemoryError):
        bytearray(2 * MINIMUM_BYTES)
    assert len(bytearray(2 * MINIMUM_BYTES)) == 2 * MINIMUM_BYTES  # zeros that are never read take no memory
