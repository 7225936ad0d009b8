"""What all tests share."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from shardlab.program.stoppable import Stoppable
from tests.support.ranks import Ranks
from tests.support.warm import WarmStarts

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's, also in processes that tests start: each core has a worker

settings.register_profile("shardlab", deadline=None, derandomize=True)  # the machine is noisy; results repeat
settings.load_profile("shardlab")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the files whose tests start ranks to two workers: one alone would be at it long after the others' end."""
    starting = [item for item in items if item.get_closest_marker("xdist_group")]
    files = list(dict.fromkeys(item.path for item in starting))
    for item in starting:
        item.add_marker(pytest.mark.xdist_group("even" if files.index(item.path) % 2 == 0 else "odd"))


@pytest.fixture(autouse=True)
def _no_program_goes_on() -> Iterator[None]:
    """What a test's program leaves running would take a core from all tests after it."""
    yield
    for thread in threading.enumerate():
        if isinstance(thread, Stoppable):
            thread.join(10)
            assert not thread.is_alive(), "a program of this test goes on; let a process of its own run it"


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """Worlds of processes by size, each started at its first use and shared by all tests."""
    worlds: dict[int, Ranks] = {}

    def world(size: int) -> Ranks:
        if size not in worlds or not worlds[size].usable:
            worlds[size] = Ranks(size)
        return worlds[size]

    yield world
    for each in worlds.values():
        if each.usable:
            each.close()


@pytest.fixture(scope="session")
def warm() -> Iterator[WarmStarts]:
    """Starts of Python programs that have their imports already."""
    starts = WarmStarts()
    yield starts
    starts.close()
