"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
from hypothesis import settings

from tests.support.ranks import Ranks

os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's, also in processes that tests start: each core has a worker

settings.register_profile("shardlab", deadline=None, derandomize=True)  # the machine is noisy; results repeat
settings.load_profile("shardlab")


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
