"""Point-to-point operations and collectives among neighbours, on the shared memory of `neighbours`.

Each function starts an operation: it copies this rank's tensors into shared memory and returns without waiting. The
`wait` of the returned `PendingWork` reads the others' tensors in place, and adds them in group order.

In a broadcast or scatter, the root also waits for an empty tensor from each receiver, and in a gather each sender waits
for one from the root. Otherwise a rank that only sends could run ahead until the memory is full.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.transport.neighbours import Channel, ExpectedTensor, Neighbours, SharedTensor

EMPTY = torch.empty(0)
"""Empty tensor, by which a rank says that it has begun an operation."""


def send(here: Neighbours, tensor: Tensor, to: int) -> PendingWork:
    """Send a tensor to a rank. The tensor may change at once; the wait ends when the send window allows it."""
    count = here.send_point_to_point(tensor, to)
    return PendingWork(then=lambda: here.wait_for_receives(to, count))


def recv(here: Neighbours, tensor: Tensor, source: int) -> PendingWork:
    """Receive into a tensor. The tensor is written by the wait."""
    expected = here.expect_point_to_point(source)
    return PendingWork(then=lambda: _receive_into(here, expected, tensor))


def all_reduce(here: Neighbours, channel: Channel, total: Tensor) -> PendingWork:
    """Sum the members' tensors in place, in group order, so that all ranks get the same bits."""
    keeps = channel.mine > 1  # the sum of the first two terms overwrites this rank's tensor
    sent = here.send(total, channel.others, channel.number, keeps=keeps)
    if keeps:
        return _reduce(here, channel, sent.tensor, total, [sent])
    return _reduce(here, channel, total, total)


def all_gather(here: Neighbours, channel: Channel, pieces: Sequence[Tensor], piece: Tensor) -> PendingWork:
    """Gather the members' pieces on all members."""
    here.send(piece, channel.others, channel.number)
    return _collect(here, channel, pieces, piece)


def reduce_scatter(here: Neighbours, channel: Channel, total: Tensor, pieces: Sequence[Tensor]) -> PendingWork:
    """Sum the members' tensors in group order; this member gets its piece of the sum."""
    _send_pieces(here, channel, pieces)
    return _reduce(here, channel, pieces[channel.mine], total)


def all_to_all(here: Neighbours, channel: Channel, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> PendingWork:
    """Send a piece to each member, and receive one from each."""
    _send_pieces(here, channel, inputs)
    return _collect(here, channel, outputs, inputs[channel.mine])


def broadcast(here: Neighbours, channel: Channel, tensor: Tensor, root: int) -> PendingWork:
    """Copy the root's tensor to the other members."""
    if channel.members[channel.mine] != root:
        return _exchange_with_root(here, channel, EMPTY, tensor, root)
    here.send(tensor, channel.others, channel.number)
    return _wait_for_all(here, channel)


def scatter(
    here: Neighbours, channel: Channel, output: Tensor, pieces: Sequence[Tensor] | None, root: int
) -> PendingWork:
    """Send a piece of the root's tensor to each member."""
    if pieces is None:
        return _exchange_with_root(here, channel, EMPTY, output, root)
    output.copy_(pieces[channel.mine])
    _send_pieces(here, channel, pieces)
    return _wait_for_all(here, channel)


def gather(
    here: Neighbours, channel: Channel, pieces: Sequence[Tensor] | None, piece: Tensor, root: int
) -> PendingWork:
    """Gather the members' pieces on the root."""
    if pieces is None:
        return _exchange_with_root(here, channel, piece, EMPTY, root)
    here.send(EMPTY, channel.others, channel.number)
    return _collect(here, channel, pieces, piece)


def barrier(here: Neighbours, channel: Channel) -> PendingWork:
    """Wait for all members."""
    here.send(EMPTY, channel.others, channel.number)
    return _wait_for_all(here, channel)


def _exchange_with_root(here: Neighbours, channel: Channel, tensor: Tensor, output: Tensor, root: int) -> PendingWork:
    """Send a tensor to the root, and receive the root's into `output`."""
    here.send(tensor, [root], channel.number)
    expected = here.expect(root, channel.number)
    return PendingWork(then=lambda: _receive_into(here, expected, output))


def _wait_for_all(here: Neighbours, channel: Channel) -> PendingWork:
    """Wait for an empty tensor from each other member."""
    return _collect(here, channel, [EMPTY] * len(channel.members), EMPTY)


def _send_pieces(here: Neighbours, channel: Channel, pieces: Sequence[Tensor]) -> None:
    """Send each other member its piece."""
    for place, rank in enumerate(channel.members):
        if place != channel.mine:
            here.send(pieces[place], [rank], channel.number)


def _expect_others(here: Neighbours, channel: Channel) -> list[ExpectedTensor]:
    """Expect a tensor from each other member, in group order."""
    return [here.expect(rank, channel.number) for rank in channel.others]


def _collect(here: Neighbours, channel: Channel, pieces: Sequence[Tensor], own: Tensor) -> PendingWork:
    """Receive a piece from each member, and copy this rank's own. As on gloo, `own` must not change until the wait."""
    places = [piece for place, piece in enumerate(pieces) if place != channel.mine]
    expected = _expect_others(here, channel)

    def take() -> None:
        pieces[channel.mine].copy_(own)
        for each, place in zip(expected, places, strict=True):
            _receive_into(here, each, place)

    return PendingWork(then=take)


def _receive_into(here: Neighbours, expected: ExpectedTensor, place: Tensor) -> None:
    """Wait for a tensor and copy it into `place`."""
    received = here.receive(expected, place)
    place.copy_(received.tensor)
    received.release()


def _reduce(
    here: Neighbours, channel: Channel, own: Tensor, total: Tensor, kept: Sequence[SharedTensor] = ()
) -> PendingWork:
    """Sum this rank's own term and those of the others, in group order.

    Args:
        here: this rank's connections.
        channel: channel of the group.
        own: this rank's term.
        total: output. On the first two members it may be the own term.
        kept: tensors that this rank has sent and still reads.
    """
    expected = _expect_others(here, channel)

    def add_up() -> None:
        shared = [here.receive(each, total) for each in expected]
        terms = [each.tensor for each in shared]
        terms.insert(channel.mine, own)
        _sum(terms, total)
        for each in (*shared, *kept):
            each.release()

    return PendingWork(then=add_up)


def _sum(terms: Sequence[Tensor], total: Tensor) -> None:
    """Add at least two terms in order. Only the first two may be `total` itself."""
    torch.add(terms[0], terms[1], out=total)
    for term in terms[2:]:
        total.add_(term)


class PendingWork:
    """Handle of an operation in flight, with the interface of torch.distributed's Work.

    Args:
        works: works of torch.distributed that the operation consists of.
        then: called once after all of them have ended.
    """

    def __init__(self, works: Sequence[Any] = (), then: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._then = then

    def wait(self) -> None:
        """Wait for the operation. Later calls return at once."""
        while self._works:
            self._works.pop(0).wait()
        if self._then is not None:
            self._then()
            self._then = None

    def get_future(self) -> Any:
        """Raise an error, as works of gloo's sends and receives do: they have no future.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("messages have no future")
