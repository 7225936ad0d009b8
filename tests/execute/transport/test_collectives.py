"""Collectives by messages: sums in group order, to the bit, on every number of members."""

# pyright: reportUnknownMemberType=false, reportPrivateImportUsage=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.transport.collectives import Communicator, group_rounds, make_groups, transport_of
from shardlab.execute.transport.neighbours import Neighbours
from shardlab.execute.transport.torch_transport import GlooTransport, PendingWork, TorchTransport, torch_transport
from shardlab.language import Group, Mesh, Op, OpKind, Program, Sizes, UserError
from shardlab.language.mesh import group_among
from shardlab.language.pass_names import MOST_BYTES_BY_MESSAGES
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]

LENGTH = 5


def _inputs_of(rank: int, size: int) -> Tensor:
    """Numbers of which the sum depends on the order."""
    return torch.randn(size, LENGTH, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def exchanged(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """What a rank receives of two sums that are under way at once, and of a gather between them."""
    group = GlooTransport(cast(Any, dist.new_group(list(range(size)))))
    summed, doubled = torch.empty(LENGTH), torch.empty(LENGTH)
    gathered = torch.empty(size * LENGTH)
    works = [
        group.reduce_scatter([summed], [_inputs_of(rank, size).flatten()]),
        group.all_gather([gathered], [_inputs_of(rank, size)[rank]]),
        group.reduce_scatter([doubled], [2 * _inputs_of(rank, size).flatten()]),
    ]
    for work in reversed(works):
        work.wait()
    assert torch.equal(doubled, 2 * summed)
    return summed, gathered


def summed(rank: int, size: int) -> list[Tensor]:
    """Two small sums that are under way at once, and one that is too large for messages."""
    group = GlooTransport(cast(Any, dist.new_group(list(range(size)))))
    large = torch.full((MOST_BYTES_BY_MESSAGES // 4 + 1,), float(rank))
    tensors = [_inputs_of(rank, size)[0], 2 * _inputs_of(rank, size)[0], large, torch.empty(0)]
    works = [group.all_reduce(group_tensors) for group_tensors in (tensors[:2], tensors[2:3], tensors[3:])]
    for work in works:
        work.wait()
    return tensors


@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_sums_are_in_group_order_on_all_ranks(ranks: World, size: int) -> None:
    expected = _inputs_of(0, size)[0]
    for rank in range(1, size):
        expected += _inputs_of(rank, size)[0]
    for first, second, large, empty in ranks(size).call(summed, size):
        assert torch.equal(first, expected)
        assert torch.equal(second, 2 * expected)
        assert torch.equal(large, torch.full_like(large, size * (size - 1) / 2))
        assert not len(empty)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_group_order_and_gathers_whole(ranks: World, size: int) -> None:
    inputs = [_inputs_of(rank, size) for rank in range(size)]
    whole = torch.cat([inputs[rank][rank] for rank in range(size)])
    for rank, (summed, gathered) in enumerate(ranks(size).call(exchanged, size)):
        expected = inputs[0][rank].clone()
        for tensor in inputs[1:]:
            expected += tensor[rank]
        assert torch.equal(summed, expected)
        assert torch.equal(gathered, whole)


def without_elements(rank: int) -> int:
    """Take part in each collective of nothing, as for a layer without parameters."""
    empty, size = torch.empty(0), dist.get_world_size()
    works: list[Any] = []
    for group in (transport_of(cast(Any, dist.group.WORLD)), GlooTransport(cast(Any, dist.group.WORLD))):
        works += [
            group.all_reduce([empty]),
            group.all_gather([empty], [empty]),
            group.reduce_scatter([empty], [empty]),
            group.all_to_all([empty], [empty]),
            group.broadcast([empty], 0),
            group.scatter([empty], [] if rank else [empty], 0),
            group.gather([] if rank else [empty], [empty], 0),
        ]
        if rank < 2:
            works.append(group.recv([empty], 0) if rank else group.send([empty], 1))
    for work in works:
        work.wait()
    return size


@pytest.mark.parametrize("size", [2, 3])
def test_collectives_of_nothing_end(ranks: World, size: int) -> None:
    assert ranks(size).call(without_elements) == [size] * size


def test_messages_have_no_future_as_those_of_gloo() -> None:
    with pytest.raises(RuntimeError, match="no future"):
        PendingWork([]).get_future()


def ranks_of_one(_: object) -> list[int]:
    return [0]


def test_a_group_without_a_backend_for_the_cpu_sends_no_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups are such; torch raises when it is asked for a backend that a group has not."""
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        group._get_backend(torch.device("cpu"))
    monkeypatch.setattr(dist, "get_process_group_ranks", ranks_of_one)
    assert type(torch_transport(group)) is TorchTransport


# Process groups: made in rounds in which all ranks count alike, with their ranks in the order that was named.


LENGTH_of_groups = 3


def meeting(groups: set[Group], ranks: int) -> Program:
    """Tapes on which each of some groups meets."""
    tapes = [
        [Op(OpKind.ALL_REDUCE, 0, (0,), (1,), 0, group) for group in groups if r in group.ranks] for r in range(ranks)
    ]
    return Program(Mesh(dp_shard=ranks), 1, Sizes.puzzle(1), tapes)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=8))
def test_every_group_is_made_once_and_no_rank_is_in_two_of_a_round(ranks: list[list[int]]) -> None:
    groups = {group_among(tuple(members)) for members in ranks}
    rounds = group_rounds(meeting(groups, 6))
    assert sorted(map(str, (group for round_ in rounds for group in round_))) == sorted(map(str, groups))
    for round_ in rounds:
        members = [rank for group in round_ for rank in group.ranks]
        assert len(set(members)) == len(members)


def terms(rank: int, members: int) -> Tensor:
    """(members, LENGTH): numbers of a rank of which a sum depends on the order."""
    return torch.randn(members, LENGTH_of_groups, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def met(rank: int, ranks: tuple[int, ...], shares_memory: bool) -> dict[str, Tensor]:
    """What a rank receives of every collective of a group, whose last member is the root."""
    with pytest.MonkeyPatch.context() as patch:
        if not shares_memory:
            patch.setattr(Neighbours, "current", None)
        group, members, root = group_among(ranks), len(ranks), ranks[-1]
        links = Communicator(meeting({group, group_among(tuple(sorted(ranks)))}, members), rank)
        whole, is_root = terms(rank, members), rank == root
        results = {name: torch.zeros(members, LENGTH_of_groups) for name in ("all_gather", "gather", "all_to_all")}
        results |= {name: torch.zeros(LENGTH_of_groups) for name in ("reduce_scatter", "scatter")}
        results |= {"all_reduce": whole.clone(), "broadcast": whole.clone()}
        transport = links.transports[group]
        place = ranks.index(root)
        works = [
            transport.all_gather([results["all_gather"]], [whole[0]]),
            transport.gather([results["gather"].flatten()] if is_root else [], [whole[0]], place),
            transport.all_to_all([results["all_to_all"]], [whole]),
            transport.reduce_scatter([results["reduce_scatter"]], [whole.flatten()]),
            transport.scatter([results["scatter"]], [whole.flatten()] if is_root else [], place),
            transport.all_reduce([results["all_reduce"]]),
            transport.broadcast([results["broadcast"]], place),
            transport.barrier(),
        ]
        for work in works:
            work.wait()
        return results


@pytest.mark.parametrize("shares_memory", [True, False], ids=["in shared memory", "by gloo"])
@pytest.mark.parametrize("order", [(0,), (1, 0), (2, 0, 1)])
def test_pieces_and_sums_are_in_the_order_in_which_ranks_are_named(
    ranks: World, order: tuple[int, ...], shares_memory: bool
) -> None:
    members = len(order)
    inputs = [terms(rank, members) for rank in order]
    total = inputs[0].clone()
    for tensor in inputs[1:]:
        total += tensor
    for rank, results in enumerate(ranks(members).call(met, order, shares_memory)):
        place = order.index(rank)
        firsts = torch.stack([tensor[0] for tensor in inputs])
        assert torch.equal(results["all_gather"], firsts)
        assert torch.equal(results["gather"], firsts if rank == order[-1] else torch.zeros_like(firsts))
        assert torch.equal(results["all_to_all"], torch.stack([tensor[place] for tensor in inputs]))
        assert torch.equal(results["reduce_scatter"], total[place])
        assert torch.equal(results["scatter"], inputs[-1][place])
        assert torch.equal(results["all_reduce"], total)
        assert torch.equal(results["broadcast"], inputs[-1])


def test_a_torch_that_sorts_ranks_makes_no_group_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_group(ranks: list[int], timeout: object = None, use_local_synchronization: bool = False) -> None:
        raise AssertionError("no group is made")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(
        UserError, match=r"a group has the ranks 1, 0 in this order, but torch .* only supports ascending ranks"
    ):
        make_groups(meeting({group_among((1, 0))}, 2), 0, {})
