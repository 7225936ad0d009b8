"""Every collective on tensors: how one call starts, and whether its result is right."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.collectives import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    recv,
    reduce_scatter,
    scatter,
    send,
)

Wait = Callable[[], Any]
Start = Callable[[], Wait]


@dataclass(frozen=True)
class Team:
    """The ranks that meet.

    Attributes:
        group: their process group.
        ranks: their global numbers.
        index: this process's place among them.
        device: where tensors are.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)

    def values(self, rank: int, elements: int) -> Tensor:
        """Make the tensor (elements,) that the member `rank` gives: small whole numbers, whose sums are exact."""
        return _pattern(elements, self.device) * (rank + 1)

    def sum(self, elements: int) -> Tensor:
        """Sum the tensors (elements,) that all members give."""
        return _pattern(elements, self.device) * (self.size * (self.size + 1) // 2)


@dataclass(frozen=True)
class CollectiveCase:
    """A collective of some size, ready to be called again and again.

    Attributes:
        bytes: of the whole value.
        start: one call, which starts at once and gives how to wait for it.
        result: where this rank's result will be; None if it has none.
        expected: what the first call must leave there.
        sent: what is overwritten by every call, and so must not grow.
    """

    bytes: int
    start: Start
    result: Tensor | None
    expected: Tensor | None
    sent: Tensor | None = None

    def wrong(self) -> int:
        """Call once, and count the elements of this rank's result that are wrong."""
        self.start()()
        if self.result is None or self.expected is None:
            return 0
        wrong = int((self.result != self.expected).sum())
        if self.sent is not None:
            self.sent.zero_()
        return wrong


def make_case(kind: str, size: int, team: Team) -> CollectiveCase:
    """A collective on float32 numbers of about `size` bytes together: a multiple of the ranks."""
    elements = max(1, size // 4 // team.size) * team.size
    return CASES[kind](elements, team)


def _pattern(elements: int, device: torch.device) -> Tensor:
    return torch.arange(elements, device=device).remainder_(7).add_(1).to(torch.float32)


def _case(
    elements: int,
    team: Team,
    call: Callable[..., Any],
    result: Tensor | None,
    expected: Tensor | None,
    sent: Tensor | None = None,
) -> CollectiveCase:
    """A collective that is given all but its group."""
    work = partial(call, group=team.group)
    return CollectiveCase(4 * elements, lambda: work().wait, result, expected, sent)


def _all_reduce(elements: int, team: Team) -> CollectiveCase:
    x = team.values(team.index, elements)
    return _case(elements, team, partial(all_reduce, x, dist.ReduceOp.SUM), x, team.sum(elements), sent=x)


def _gathered(elements: int, team: Team) -> Tensor:
    return torch.cat([team.values(rank, elements // team.size) for rank in range(team.size)])


def _all_gather(elements: int, team: Team) -> CollectiveCase:
    piece = team.values(team.index, elements // team.size)
    whole = piece.new_empty(elements)
    return _case(elements, team, partial(all_gather, whole, piece), whole, _gathered(elements, team))


def _reduce_scatter(elements: int, team: Team) -> CollectiveCase:
    whole = team.values(team.index, elements)
    piece = whole.new_empty(elements // team.size)
    expected = team.sum(elements).chunk(team.size)[team.index]
    return _case(elements, team, partial(reduce_scatter, piece, whole), piece, expected)


def _all_to_all(elements: int, team: Team) -> CollectiveCase:
    given = team.values(team.index, elements)
    taken = torch.empty_like(given)
    pieces = [team.values(rank, elements).chunk(team.size)[team.index] for rank in range(team.size)]
    return _case(elements, team, partial(all_to_all, taken, given), taken, torch.cat(pieces))


def _broadcast(elements: int, team: Team) -> CollectiveCase:
    x = team.values(team.index, elements)
    return _case(elements, team, partial(broadcast, x, team.ranks[0]), x, team.values(0, elements))


def _reduce(elements: int, team: Team) -> CollectiveCase:
    x = team.values(team.index, elements)
    expected = team.sum(elements) if team.index == 0 else None
    return _case(elements, team, partial(dist.reduce, x, team.ranks[0], async_op=True), x, expected, sent=x)


def _gather(elements: int, team: Team) -> CollectiveCase:
    piece = team.values(team.index, elements // team.size)
    whole = None if team.index else piece.new_empty(elements)
    expected = None if team.index else _gathered(elements, team)
    return _case(elements, team, partial(gather, whole, piece, team.ranks[0]), whole, expected)


def _scatter(elements: int, team: Team) -> CollectiveCase:
    given = team.values(0, elements)
    piece = torch.empty_like(given.chunk(team.size)[0])
    call = partial(scatter, piece, None if team.index else given, team.ranks[0])
    return _case(elements, team, call, piece, given.chunk(team.size)[team.index].clone())


def _barrier(elements: int, team: Team) -> CollectiveCase:
    return _case(0, team, barrier, None, None)


def _send_recv(elements: int, team: Team) -> CollectiveCase:
    """A message from the first to the second and back; its time is twice that of one message."""
    assert team.size == 2, "a message has two ends"
    other = team.ranks[1 - team.index]
    x = team.values(0, elements) if team.index == 0 else torch.zeros(elements, device=team.device)

    def ping_pong() -> Wait:
        first, second = (send, recv) if team.index == 0 else (recv, send)
        first(x, other).wait()
        return second(x, other).wait

    return CollectiveCase(4 * elements, ping_pong, x, team.values(0, elements))


CASES: dict[str, Callable[[int, Team], CollectiveCase]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "gather": _gather,
    "scatter": _scatter,
    "barrier": _barrier,
    "send_recv": _send_recv,
}
