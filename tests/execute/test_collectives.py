"""Collectives by messages: sums in group order, to the bit, on every number of members."""

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.collectives import _by_messages as by_messages
from shardlab.execute.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    gather,
    recv,
    reduce_scatter,
    scatter,
    send,
)
from shardlab.execute.messages import Messages
from shardlab.program.ways import BY_MESSAGES
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]

LENGTH = 5


def _given(rank: int, size: int) -> Tensor:
    """Numbers of which the sum depends on the order."""
    return torch.randn(size, LENGTH, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def exchanged(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What a rank receives of two sums that are under way at once, and of a gather between them."""
    group: Any = dist.new_group(list(range(size)))
    summed, again = torch.empty(LENGTH), torch.empty(LENGTH)
    gathered = torch.empty(size * LENGTH)
    works = [
        reduce_scatter(summed, _given(rank, size).flatten(), group),
        all_gather(gathered, _given(rank, size)[rank], group),
        reduce_scatter(again, 2 * _given(rank, size).flatten(), group),
    ]
    for work in reversed(works):
        work.wait()
    assert torch.equal(again, 2 * summed)
    return summed, gathered


def summed(rank: int, size: int) -> list[Tensor]:
    """Two small sums that are under way at once, and one that is too large for messages."""
    group: Any = dist.new_group(list(range(size)))
    large = torch.full((BY_MESSAGES // 4 + 1,), float(rank))
    given = [_given(rank, size)[0], 2 * _given(rank, size)[0], large, torch.empty(0)]
    works = [all_reduce(each, dist.ReduceOp.SUM, group) for each in given]
    for work in works:
        work.wait()
    return given


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_sums_are_in_group_order_on_all_ranks(ranks: World, size: int) -> None:
    expected = _given(0, size)[0]
    for rank in range(1, size):
        expected += _given(rank, size)[0]
    for first, second, large, nothing in ranks(size).call(summed, size):
        assert torch.equal(first, expected)
        assert torch.equal(second, 2 * expected)
        assert torch.equal(large, torch.full_like(large, size * (size - 1) / 2))
        assert not len(nothing)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_group_order_and_gathers_whole(ranks: World, size: int) -> None:
    given = [_given(rank, size) for rank in range(size)]
    whole = torch.cat([given[rank][rank] for rank in range(size)])
    for rank, (summed, gathered) in enumerate(ranks(size).call(exchanged, size)):
        expected = given[0][rank].clone()
        for each in given[1:]:
            expected += each[rank]
        assert torch.equal(summed, expected)
        assert torch.equal(gathered, whole)


def without_elements(rank: int) -> int:
    """Take part in each collective of nothing, as for a layer without parameters."""
    group: Any = dist.group.WORLD
    nothing, size = torch.empty(0), dist.get_world_size()
    works = [
        all_reduce(nothing, dist.ReduceOp.SUM, group),
        all_gather(nothing, nothing, group),
        reduce_scatter(nothing, nothing, group),
        all_to_all(nothing, nothing, group),
        broadcast(nothing, 0, group),
        scatter(nothing, None if rank else nothing, 0, group),
        gather(None if rank else nothing, nothing, 0, group),
    ]
    works.append(send(nothing, 1) if not rank else recv(nothing, 0) if rank == 1 else Messages())
    for work in works:
        work.wait()
    return size


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_nothing_end(ranks: World, size: int) -> None:
    assert ranks(size).call(without_elements) == [size] * size


def test_messages_have_no_future_as_those_of_gloo() -> None:
    with pytest.raises(RuntimeError, match="no future"):
        Messages([]).get_future()


def test_a_group_without_a_backend_for_the_cpu_sends_no_messages() -> None:
    """NCCL's groups are such; torch raises when it is asked for a backend that a group has not."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group._get_backend(torch.device("cpu"))
    assert not by_messages(group)
