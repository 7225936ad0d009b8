"""What ranks of a launcher's world tell one another by its store."""

# pyright: reportPrivateImportUsage=false
# torch does not mark its stores as exported.

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch.distributed as dist

from shardlab.errors import UserError
from shardlab.train.launch_environment import LaunchEnvironment
from shardlab.train.stores import Together
from tests.support.ports import free_port

SHORT = timedelta(seconds=0.2)


def place(rank: int, port: int) -> LaunchEnvironment:
    return LaunchEnvironment(rank, 2, rank, "127.0.0.1", port)


def test_a_rank_whose_others_do_not_come_says_so_in_time() -> None:
    alone = Together(place(0, free_port()), SHORT)
    with pytest.raises(
        UserError, match=r"^rank 0 of 2 has lost the others at the start \(.*\); look at what they"
    ) as said:
        alone.exchange("here")
    assert "\n" not in str(said.value)


def test_rank_0_whose_store_it_is_leaves_when_all_have_heard() -> None:
    port, get, there = free_port(), dist.PrefixStore.get, list[bool]()
    first, second = Together(place(0, port)), Together(place(1, port))

    def look(store: dist.PrefixStore, key: str) -> bytes:
        found = get(store, key)
        if key == "words":
            with pytest.raises(TimeoutError):
                leaving.result(0.3)
            there.append(True)
        return found

    with ThreadPoolExecutor(1) as pool, patch.object(dist.PrefixStore, "get", look):
        leaving: Future[list[str]] = pool.submit(first.exchange, "a")
        assert second.exchange("b") == ["a", "b"]
        assert leaving.result(60) == ["a", "b"]
    assert there
