"""Process groups: made in rounds in which all ranks count alike, with their ranks in the order that was named."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardlab.execute.communicator import Communicator
from shardlab.execute.groups import make_groups, rounds
from shardlab.execute.neighbours import Neighbours
from shardlab.program import Group, Mesh, Op, OpKind, Program, Sizes, UserError
from shardlab.program.mesh import group_among
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]

LENGTH = 3


def meeting(groups: set[Group], ranks: int) -> Program:
    """Tapes on which each of some groups meets."""
    tapes = [
        [Op(OpKind.ALL_REDUCE, 0, (0,), (1,), 0, group) for group in groups if r in group.ranks] for r in range(ranks)
    ]
    return Program(Mesh(dp_shard=ranks), 1, Sizes.puzzle(1), tapes)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=4, unique=True), max_size=8))
def test_every_group_is_made_once_and_no_rank_is_in_two_of_a_round(ranks: list[list[int]]) -> None:
    groups = {group_among(tuple(each)) for each in ranks}
    made = rounds(meeting(groups, 6))
    assert sorted(map(str, (group for each in made for group in each))) == sorted(map(str, groups))
    for each in made:
        members = [rank for group in each for rank in group.ranks]
        assert len(set(members)) == len(members)


def terms(rank: int, members: int) -> Tensor:
    """(members, LENGTH): numbers of a rank of which a sum depends on the order."""
    return torch.randn(members, LENGTH, generator=torch.Generator().manual_seed(rank)) * 10.0**rank


def met(rank: int, ranks: tuple[int, ...], shares_memory: bool) -> dict[str, Tensor]:
    """What a rank receives of every collective of a group, whose last member is the root."""
    with pytest.MonkeyPatch.context() as patch:
        if not shares_memory:
            patch.setattr(Neighbours, "here", None)
        group, members, root = group_among(ranks), len(ranks), ranks[-1]
        links = Communicator(meeting({group, group_among(tuple(sorted(ranks)))}, members), rank)
        whole, is_root = terms(rank, members), rank == root
        made = {name: torch.zeros(members, LENGTH) for name in ("all_gather", "gather", "all_to_all")}
        made |= {name: torch.zeros(LENGTH) for name in ("reduce_scatter", "scatter")}
        made |= {"all_reduce": whole.clone(), "broadcast": whole.clone()}
        links.all_gather(made["all_gather"], whole[0], group)()
        links.gather(made["gather"].flatten() if is_root else None, whole[0], group, root)()
        links.all_to_all(made["all_to_all"], whole, group)()
        links.reduce_scatter(made["reduce_scatter"], whole.flatten(), group)()
        links.scatter(made["scatter"], whole.flatten() if is_root else None, group, root)()
        links.all_reduce(made["all_reduce"], group)()
        links.broadcast(made["broadcast"], group, root)()
        links.barrier(group)()
        return made


@pytest.mark.parametrize("shares_memory", [True, False], ids=["in shared memory", "by gloo"])
@pytest.mark.parametrize("order", [(0,), (1, 0), (2, 0, 1)])
def test_pieces_and_sums_are_in_the_order_in_which_ranks_are_named(
    ranks: World, order: tuple[int, ...], shares_memory: bool
) -> None:
    members = len(order)
    given = [terms(rank, members) for rank in order]
    total = given[0].clone()
    for each in given[1:]:
        total += each
    for rank, made in enumerate(ranks(members).call(met, order, shares_memory)):
        place = order.index(rank)
        firsts = torch.stack([each[0] for each in given])
        assert torch.equal(made["all_gather"], firsts)
        assert torch.equal(made["gather"], firsts if rank == order[-1] else torch.zeros_like(firsts))
        assert torch.equal(made["all_to_all"], torch.stack([each[place] for each in given]))
        assert torch.equal(made["reduce_scatter"], total[place])
        assert torch.equal(made["scatter"], given[-1][place])
        assert torch.equal(made["all_reduce"], total)
        assert torch.equal(made["broadcast"], given[-1])


def test_a_torch_that_sorts_ranks_makes_no_group_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def new_group(ranks: list[int], timeout: object = None, use_local_synchronization: bool = False) -> None:
        raise AssertionError("no group is made")

    monkeypatch.setattr(dist, "new_group", new_group)
    with pytest.raises(UserError, match=r"the ranks 1, 0 meet in this order, but torch .* ascending order alone"):
        make_groups(meeting({group_among((1, 0))}, 2), 0, {})
