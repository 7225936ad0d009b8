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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the files whose tests start ranks to two workers: one alone would be at it long after the others' end."""
    starting = [item for item in items if item.get_closest_marker("xdist_group")]
    files = list(dict.fromkeys(item.path for item in starting))
    for item in starting:
        item.add_marker(pytest.mark.xdist_group("even" if files.index(item.path) % 2 == 0 else "odd"))


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
