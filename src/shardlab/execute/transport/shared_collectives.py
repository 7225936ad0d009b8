"""Messages and collectives among neighbours, through the memory that they share.

Each starts by copying what this rank gives, so that no one is waited for; the rank that waits takes the rest from where
the others have put it, and adds it there in group order.

What goes from or to one rank alone is answered: who receives sends back a tensor without elements when it begins, and
who gives waits for it. Else it might run ahead for as long as memory lasts.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.transport.neighbours import Channel, Expected, Neighbours, SharedTensor

NOTHING = torch.empty(0)
"""What a rank sends that has come, and gives nothing."""


def send(here: Neighbours, tensor: Tensor, to: int) -> Messages:
    """Send a tensor to a rank; it may change at once, but the wait holds back who is far ahead (see `lead`)."""
    count = here.send_message(tensor, to)
    return Messages(then=lambda: here.wait_for_receives(to, count))


def recv(here: Neighbours, tensor: Tensor, source: int) -> Messages:
    """Receive into a tensor, when it is waited for."""
    expected = here.expect_message(source)
    return Messages(then=lambda: _take(here, expected, tensor))


def all_reduce(here: Neighbours, channel: Channel, total: Tensor) -> Messages:
    """Sum what the members give, in place and in group order, alike on all to the bit."""
    keeps = channel.mine > 1  # the sum of the first two members' is written over this rank's own
    sent = here.send(total, channel.others, channel.number, keeps=keeps)
    if keeps:
        return _summed(here, channel, sent.tensor, total, [sent])
    return _summed(here, channel, total, total)


def all_gather(here: Neighbours, channel: Channel, pieces: Sequence[Tensor], piece: Tensor) -> Messages:
    """The members' pieces, each into its place."""
    here.send(piece, channel.others, channel.number)
    return _taken(here, channel, pieces, piece)


def reduce_scatter(here: Neighbours, channel: Channel, total: Tensor, pieces: Sequence[Tensor]) -> Messages:
    """Sum of this member's piece of what each gives, in group order."""
    _give(here, channel, pieces)
    return _summed(here, channel, pieces[channel.mine], total)


def all_to_all(here: Neighbours, channel: Channel, taken: Sequence[Tensor], given: Sequence[Tensor]) -> Messages:
    """A piece to each member, and from each one."""
    _give(here, channel, given)
    return _taken(here, channel, taken, given[channel.mine])


def broadcast(here: Neighbours, channel: Channel, tensor: Tensor, root: int) -> Messages:
    """The root's tensor into the others'."""
    if channel.members[channel.mine] != root:
        return _with_root(here, channel, NOTHING, tensor, root)
    here.send(tensor, channel.others, channel.number)
    return _all_come(here, channel)


def scatter(here: Neighbours, channel: Channel, output: Tensor, pieces: Sequence[Tensor] | None, root: int) -> Messages:
    """A piece of the root's to each member."""
    if pieces is None:
        return _with_root(here, channel, NOTHING, output, root)
    output.copy_(pieces[channel.mine])
    _give(here, channel, pieces)
    return _all_come(here, channel)


def gather(here: Neighbours, channel: Channel, pieces: Sequence[Tensor] | None, piece: Tensor, root: int) -> Messages:
    """The members' pieces, each into its place on the root."""
    if pieces is None:
        return _with_root(here, channel, piece, NOTHING, root)
    here.send(NOTHING, channel.others, channel.number)
    return _taken(here, channel, pieces, piece)


def barrier(here: Neighbours, channel: Channel) -> Messages:
    """Nothing of each member."""
    here.send(NOTHING, channel.others, channel.number)
    return _all_come(here, channel)


def _with_root(here: Neighbours, channel: Channel, given: Tensor, place: Tensor, root: int) -> Messages:
    """Give the root a tensor, and take what it gives this rank into its place."""
    here.send(given, [root], channel.number)
    expected = here.expect(root, channel.number)
    return Messages(then=lambda: _take(here, expected, place))


def _all_come(here: Neighbours, channel: Channel) -> Messages:
    """Wait until all others have said that they have come."""
    return _taken(here, channel, [NOTHING] * len(channel.members), NOTHING)


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
            _take(here, each, place)

    return Messages(then=take)


def _take(here: Neighbours, expected: Expected, place: Tensor) -> None:
    """Wait for a tensor, and copy it to its place."""
    received = here.receive(expected, place)
    place.copy_(received.tensor)
    received.taken()


def _summed(
    here: Neighbours, channel: Channel, own: Tensor, total: Tensor, kept: Sequence[SharedTensor] = ()
) -> Messages:
    """The sum of this rank's own term and what comes of the others, in group order.

    Args:
        here: this rank's neighbours.
        channel: of the group.
        own: this rank's term.
        total: where the sum is written; it may be the own term of the first two members.
        kept: what this rank has sent and still reads.
    """
    expected = _expect(here, channel)

    def add_up() -> None:
        shared = [here.receive(each, total) for each in expected]
        terms = [each.tensor for each in shared]
        terms.insert(channel.mine, own)
        _sum(terms, total)
        for each in (*shared, *kept):
            each.taken()

    return Messages(then=add_up)


def _sum(terms: Sequence[Tensor], total: Tensor) -> None:
    """Add up at least two terms in their order; of those only the first two may be the total itself."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


# What communication gives that has started: how to wait for it.


class Messages:
    """Messages that have started, as one work of torch.distributed.

    Args:
        works: of each message that torch.distributed has started.
        then: what is left to do once all are over.
    """

    def __init__(self, works: Sequence[Any] = (), then: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self) -> None:
        """Wait for all of them, once."""
        while self._works:
            self._works.pop(0).wait()
        if self._then is not None:
            self._then()
            self._then = None

    def get_future(self) -> Any:
        """There is none, as for every message of gloo.

        Raises:
            RuntimeError: always, as torch's works do that have none.
        """
        raise RuntimeError("messages have no future")
