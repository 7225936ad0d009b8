"""Each collective on a few whole numbers: what every rank has before and after, by the executor's own communicator."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport.collectives import Communicator
from shardlab.language import Group, Rank, Reduction, trace

Numbers = list[float] | None
"""A rank's tensor, or None where it has none."""

APART = 0.02
"""Seconds between the ranks' arrivals at a barrier."""


@dataclass(frozen=True)
class Shown:
    """What became of the ranks' tensors.

    Attributes:
        steps: the collectives that were run, one after the other.
        tensors: before the first step and after each, every rank's, in rank order; of a barrier, milliseconds since
            the first rank came, when each came and when it went on.
    """

    steps: tuple[str, ...]
    tensors: list[list[Numbers]]

    @property
    def before(self) -> list[Numbers]:
        return self.tensors[0]

    @property
    def after(self) -> list[Numbers]:
        return self.tensors[-1]


class Member:
    """A rank among those that meet.

    Args:
        rank, ranks: its number, and how many there are.
        root, by: of the collectives that have a root, or reduce.
    """

    def __init__(self, rank: int, ranks: int, device: torch.device, root: int, by: Reduction) -> None:
        program = trace(_meet, ranks, 1, 1)
        group = program.tapes[rank][0].group
        assert group is not None
        self.group: Group = group
        self.links = Communicator(program, rank)
        self.rank, self.ranks, self.device = rank, ranks, device
        self.root, self.by = root, by
        self.unit = 10 if ranks <= 10 else 100

    def whole(self) -> Tensor:
        """This rank's tensor, an element for each rank: the tens say whose, the ones which."""
        return torch.arange(float(self.ranks), device=self.device) + self.unit * self.rank

    def piece(self) -> Tensor:
        """The element that stands at this rank's own place."""
        return self.whole()[self.rank : self.rank + 1].clone()

    def if_root(self) -> Tensor | None:
        return self.whole() if self.rank == self.root else None

    def room(self, elements: int) -> Tensor:
        return torch.empty(elements, device=self.device)


async def _meet(rank: Rank) -> None:
    """All ranks as one group."""
    await rank.barrier()


Act = Callable[[Member, Any], Tensor | None]
"""A rank's part in a collective: from what it gives to what it receives."""


def broadcast(member: Member, given: Tensor | None) -> Tensor:
    tensor = member.room(member.ranks) if given is None else given.clone()
    member.links.broadcast(tensor, member.group, member.root)()
    return tensor


def scatter(member: Member, given: Tensor | None) -> Tensor:
    piece = member.room(1)
    member.links.scatter(piece, given, member.group, member.root)()
    return piece


def gather(member: Member, given: Tensor) -> Tensor | None:
    whole = member.room(member.ranks) if member.rank == member.root else None
    member.links.gather(whole, given, member.group, member.root)()
    return whole


def reduce(member: Member, given: Tensor) -> Tensor | None:
    total = given.clone()
    member.links.reduce(total, member.group, member.root, member.by)()
    return total if member.rank == member.root else None


def all_reduce(member: Member, given: Tensor) -> Tensor:
    total = given.clone()
    member.links.all_reduce(total, member.group, member.by)()
    return total


def all_gather(member: Member, given: Tensor) -> Tensor:
    whole = member.room(member.ranks)
    member.links.all_gather(whole, given, member.group)()
    return whole


def reduce_scatter(member: Member, given: Tensor) -> Tensor:
    piece = member.room(1)
    member.links.reduce_scatter(piece, given, member.group)()
    return piece


def all_to_all(member: Member, given: Tensor) -> Tensor:
    whole = member.room(member.ranks)
    member.links.all_to_all(whole, given, member.group)()
    return whole


def send(member: Member, given: Tensor | None) -> Tensor | None:
    """From the root to the rank after it."""
    to = (member.root + 1) % member.ranks
    if given is not None:
        member.links.send(given, to, -1)()
        return given
    if member.rank != to:
        return None
    tensor = member.room(member.ranks)
    member.links.recv(tensor, member.root, -1)()
    return tensor


ACTS: dict[str, tuple[Callable[[Member], Tensor | None], Act]] = {
    "broadcast": (Member.if_root, broadcast),
    "scatter": (Member.if_root, scatter),
    "gather": (Member.piece, gather),
    "reduce": (Member.whole, reduce),
    "all_reduce": (Member.whole, all_reduce),
    "all_gather": (Member.piece, all_gather),
    "reduce_scatter": (Member.whole, reduce_scatter),
    "all_to_all": (Member.whole, all_to_all),
    "send": (Member.if_root, send),
}
"""What each rank has before a collective, and what it then does."""

BARRIER = "barrier"


def show_rank(
    rank: int, device: torch.device, cases: Sequence[tuple[str, ...]], root: int, by: Reduction
) -> list[Shown] | None:
    """One rank's part of all cases, each a collective or several in a row; rank 0 gives what all ranks had.

    A case of several begins with what its first collective is shown with.
    """
    member = Member(rank, dist.get_world_size(), device, root, by)
    mine = [_times(member) if case == (BARRIER,) else _tensors(member, case) for case in cases]
    everyone: list[Any] | None = [None] * member.ranks if rank == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    return [
        Shown(case, [list(column) for column in zip(*(theirs[at] for theirs in everyone), strict=True)])
        for at, case in enumerate(cases)
    ]


def _tensors(member: Member, case: Sequence[str]) -> list[Numbers]:
    tensor: Tensor | None = ACTS[case[0]][0](member)
    had = [_numbers(tensor)]
    for name in case:
        tensor = ACTS[name][1](member, tensor)
        had.append(_numbers(tensor))
    return had


def _numbers(tensor: Tensor | None) -> Numbers:
    return None if tensor is None else [float(number) for number in tensor.cpu()]


def _times(member: Member) -> list[Numbers]:
    """The ranks come one after the other; milliseconds since the first, on the clock that processes share."""
    member.links.barrier(member.group)()
    time.sleep(APART * member.rank)
    came = time.time()
    member.links.barrier(member.group)()
    went = time.time()
    first = torch.tensor([came], dtype=torch.float64, device=member.device)
    member.links.all_reduce(first, member.group, Reduction.MIN)()
    return [[1000 * (moment - first.item())] for moment in (came, went)]
