"""The processes that tests share: after one fails, no test waits for ever."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.support import ranks
from tests.support.ranks import Ranks


def sum_of_ranks(rank: int) -> float:
    total = torch.tensor(float(rank))
    cast(Any, dist).all_reduce(total)
    return total.item()


def raise_on_rank_1(rank: int) -> float:
    if rank == 1:
        raise ValueError("rank 1 has had enough")
    return sum_of_ranks(rank)


def exit_on_rank_1(rank: int) -> float:
    if rank == 1:
        os._exit(3)
    return sum_of_ranks(rank)


def test_a_rank_that_fails_ends_the_call_and_the_world(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PATIENCE_SECONDS", 0.5)
    world = Ranks(2)
    try:
        assert world.call(sum_of_ranks) == [1.0, 1.0]
        with pytest.raises(AssertionError, match=r"(?s)rank 0:\nwaited for.*rank 1 has had enough"):
            world.call(raise_on_rank_1)
        assert not world.usable
    finally:
        world.close()


def test_a_rank_that_dies_ends_the_call() -> None:
    world = Ranks(2)
    try:
        with pytest.raises(AssertionError, match=r"rank 1:\nthe process ended"):
            world.call(exit_on_rank_1)
        assert not world.usable
    finally:
        world.close()
