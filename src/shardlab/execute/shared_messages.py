"""Messages and collectives among neighbours, through the memory that they share.

Each starts by copying what this rank gives, so that no one is waited for; the rank that waits takes the rest from where
the others have put it, and adds it there in group order.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.execute.messages import Messages
from shardlab.execute.neighbours import Channel, Expected, Neighbours


def send(here: Neighbours, tensor: Tensor, to: int) -> Messages:
    """Send a tensor to a rank; it may change at once."""
    here.send(tensor, [to])
    return Messages()


def recv(here: Neighbours, tensor: Tensor, source: int) -> Messages:
    """Receive into a tensor, when it is waited for."""
    expected = here.expect(source)

    def take() -> None:
        received = here.receive(expected, tensor)
        tensor.copy_(received.tensor)
        received.taken()

    return Messages(then=take)


def all_reduce(here: Neighbours, channel: Channel, total: Tensor) -> Messages:
    """Sum what the members give, in place and in group order, alike on all to the bit."""
    mine = channel.mine
    own = here.send(total, channel.others, channel.number, keeps=mine > 1)  # the first two's sum is written over it
    expected = _expect(here, channel)

    def add_up() -> None:
        shared = [here.receive(each, total) for each in expected]
        if mine > 1:
            shared.insert(mine, own)
        terms = [each.tensor for each in shared]
        if mine < 2:  # what this rank has sent may be gone when the others have read it
            terms.insert(mine, total)
        _sum(terms, total)
        for each in shared:
            each.taken()

    return Messages(then=add_up)


def all_gather(here: Neighbours, channel: Channel, pieces: Sequence[Tensor], piece: Tensor) -> Messages:
    """The members' pieces, each into its place."""
    here.send(piece, channel.others, channel.number)
    return _taken(here, channel, pieces, piece)


def reduce_scatter(here: Neighbours, channel: Channel, total: Tensor, pieces: Sequence[Tensor]) -> Messages:
    """Sum of this member's piece of what each gives, in group order."""
    _give(here, channel, pieces)
    expected = _expect(here, channel)

    def add_up() -> None:
        shared = [here.receive(each, total) for each in expected]
        terms = [each.tensor for each in shared]
        terms.insert(channel.mine, pieces[channel.mine])
        _sum(terms, total)
        for each in shared:
            each.taken()

    return Messages(then=add_up)


def all_to_all(here: Neighbours, channel: Channel, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Messages:
    """A piece to each member, and from each one."""
    _give(here, channel, given)
    return _taken(here, channel, taken, given[channel.mine])


def _give(here: Neighbours, channel: Channel, pieces: Sequence[Tensor]) -> None:
    for place, rank in enumerate(channel.members):
        if place != channel.mine:
            here.send(pieces[place], [rank], channel.number)


def _expect(here: Neighbours, channel: Channel) -> list[Expected]:
    """What comes of the other members, in group order."""
    return [here.expect(rank, channel.number) for rank in channel.others]


def _taken(here: Neighbours, channel: Channel, pieces: Sequence[Tensor], own: Tensor) -> Messages:
    """A piece of each member into its place; this rank's own too, which stays until then, as it does on gloo."""
    places = [piece for place, piece in enumerate(pieces) if place != channel.mine]
    expected = _expect(here, channel)

    def take() -> None:
        pieces[channel.mine].copy_(own)
        for each, place in zip(expected, places, strict=True):
            received = here.receive(each, place)
            place.copy_(received.tensor)
            received.taken()

    return Messages(then=take)


def _sum(terms: Sequence[Tensor], total: Tensor) -> None:
    """Add up at least two terms in their order; of those only the first two may be the total itself."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)
