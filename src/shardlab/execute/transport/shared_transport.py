"""Transport of a group whose members are neighbours: collectives and messages on the shared memory of `neighbours`.

Each verb starts an operation: it copies this rank's tensors into shared memory and returns without waiting. The `wait`
of the returned work reads the others' tensors in place, and reduces them in group order.

In a broadcast or scatter, the root also waits for an empty message from each receiver. In a gather or reduce, each
sender waits for an empty message from the root. Otherwise, a rank that only sends could run ahead until the memory is
full.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from shardlab.execute.transport.neighbours import ExpectedMessage, Neighbours, SharedTensors, channel_number
from shardlab.language import Reduction

_REDUCE: dict[Reduction, Callable[..., Tensor]] = {
    Reduction.SUM: torch.add,
    Reduction.MEAN: torch.add,
    Reduction.MIN: torch.minimum,
    Reduction.MAX: torch.maximum,
}


class SharedTransport:
    """Shared memory among the members of a group. `Transport` describes the verbs.

    Args:
        neighbours: this rank's connections. All members with which this rank exchanges messages must be neighbours.
        name: name of the group, equal on all members and different for each group.
        members: ranks of the members, in group order.
    """

    def __init__(self, neighbours: Neighbours, name: str, members: Sequence[int]) -> None:
        self._neighbours, self._name, self._members = neighbours, name, members
        self._index, self._size = members.index(neighbours.rank), len(members)
        self._others = [*members[: self._index], *members[self._index + 1 :]]
        self._channel = channel_number(name)
        self._streams: dict[Hashable, deque[SharedWork]] = {}

    def all_reduce(self, tensors: Sequence[Tensor], by: Reduction = Reduction.SUM) -> SharedWork:
        keeps = self._index > 1  # the sum of the first two terms overwrites this rank's tensor
        offset = self._neighbours.send(tensors, self._others, self._channel, keeps=keeps)
        if not keeps:
            return self._reduce(tensors, tensors, by)
        own_message = self._neighbours.kept_copy(offset, tensors)
        return self._reduce(own_message.tensors, tensors, by, [own_message])

    def reduce(self, tensors: Sequence[Tensor], root: int, by: Reduction = Reduction.SUM) -> SharedWork:
        if self._index != root:
            return self._exchange_with_root(tensors, [], root)
        own_terms = [tensor.clone() for tensor in tensors] if root > 1 else tensors
        self._neighbours.send([], self._others, self._channel)
        return self._reduce(own_terms, tensors, by)

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> SharedWork:
        if self._index != root:
            return self._exchange_with_root([], tensors, root)
        self._neighbours.send(tensors, self._others, self._channel)
        return self._wait_for_all()

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> SharedWork:
        self._neighbours.send(inputs, self._others, self._channel)
        return self._collect(self._pieces(outputs), _flat(inputs))

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], by: Reduction = Reduction.SUM
    ) -> SharedWork:
        pieces = self._send_pieces(inputs)
        return self._reduce(pieces[self._index], _flat(outputs), by)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> SharedWork:
        return self._collect(self._pieces(outputs), self._send_pieces(inputs)[self._index])

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> SharedWork:
        if self._index != root:
            return self._exchange_with_root([], outputs, root)
        _copy(_flat(outputs), self._send_pieces(inputs)[self._index])
        return self._wait_for_all()

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> SharedWork:
        if self._index != root:
            return self._exchange_with_root(inputs, [], root)
        self._neighbours.send([], self._others, self._channel)
        return self._collect(self._pieces(outputs), _flat(inputs))

    def barrier(self) -> SharedWork:
        self._neighbours.send([], self._others, self._channel)
        return self._wait_for_all()

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> SharedWork:
        neighbours, rank, channel = self._neighbours, self._members[to], channel_number(self._name, tag)
        count = neighbours.send_point_to_point(tensors, rank, channel)
        return SharedWork(lambda: neighbours.wait_for_receives(rank, channel, count))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> SharedWork:
        expected = self._neighbours.expect_point_to_point(self._members[source], channel_number(self._name, tag))
        return self._start([expected], lambda: self._receive_into(expected, tensors), (source, tag))

    def _start(
        self, expected: Sequence[ExpectedMessage], complete: Callable[[], object], stream: Hashable = None
    ) -> SharedWork:
        """Return the work of an operation, and finish earlier works that have not been waited for.

        Args:
            expected: messages that the operation waits for.
            complete: function that reads the messages.
            stream: key of a stream. Works of one stream end in the order in which they started.
        """
        works = self._streams.setdefault(stream, deque())
        while len(works) >= MAX_UNFINISHED and self._neighbours.have_arrived(works[0].expected):
            works[0].finish()
        work = SharedWork(complete, expected, works)
        works.append(work)
        return work

    def _exchange_with_root(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor], root: int) -> SharedWork:
        """Send tensors to the root, and receive the root's tensors into `outputs`."""
        rank = self._members[root]
        self._neighbours.send(inputs, [rank], self._channel)
        expected = self._neighbours.expect(rank, self._channel)
        return self._start([expected], lambda: self._receive_into(expected, outputs))

    def _wait_for_all(self) -> SharedWork:
        """Wait for an empty message from each other member."""
        return self._collect([()] * self._size, ())

    def _pieces(self, wholes: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Split tensors, which may be empty, into equal flat pieces. Returns the pieces of each member."""
        size = self._size
        return list(zip(*(whole.view(size, whole.numel() // size).unbind() for whole in wholes), strict=True))

    def _send_pieces(self, wholes: Sequence[Tensor]) -> list[tuple[Tensor, ...]]:
        """Send each other member its pieces, and return the pieces of all members."""
        pieces = self._pieces(wholes)
        for place, rank in enumerate(self._members):
            if place != self._index:
                self._neighbours.send(pieces[place], [rank], self._channel)
        return pieces

    def _expect_others(self) -> list[ExpectedMessage]:
        """Expect a message from each other member, in group order."""
        return [self._neighbours.expect(rank, self._channel) for rank in self._others]

    def _collect(self, outputs: Sequence[Sequence[Tensor]], own_pieces: Sequence[Tensor]) -> SharedWork:
        """Receive pieces from each other member, and copy this rank's own pieces.

        Args:
            outputs: for each member, the tensors that receive its pieces.
            own_pieces: this rank's pieces. They must not change until the wait has ended.
        """
        places = [*outputs[: self._index], *outputs[self._index + 1 :]]
        expected = self._expect_others()

        def copy_all() -> None:
            _copy(outputs[self._index], own_pieces)
            for message, place in zip(expected, places, strict=True):
                self._receive_into(message, place)

        return self._start(expected, copy_all)

    def _receive_into(self, expected: ExpectedMessage, places: Sequence[Tensor]) -> None:
        """Wait for a message and copy its tensors into `places`."""
        received = self._neighbours.receive(expected, places)
        _copy(places, received.tensors)
        received.release()

    def _reduce(
        self,
        own_terms: Sequence[Tensor],
        totals: Sequence[Tensor],
        by: Reduction,
        own_messages: Sequence[SharedTensors] = (),
    ) -> SharedWork:
        """Reduce the terms of all ranks in group order, so that the results are bitwise equal on all ranks.

        Args:
            own_terms: this rank's terms.
            totals: tensors of the result. On the first two members they may be `own_terms`.
            by: the reduction.
            own_messages: messages that this rank has sent and reads too.
        """
        expected, reduce = self._expect_others(), _REDUCE[by]

        def reduce_all() -> None:
            messages = [self._neighbours.receive(message, totals) for message in expected]
            terms = [message.tensors for message in messages]
            terms.insert(self._index, [*own_terms])
            for total, first, *others in zip(totals, *terms, strict=True):
                for term in others:
                    first = reduce(first, term, out=total)
                if by is Reduction.MEAN:
                    total.div_(self._size)
            for message in (*messages, *own_messages):
                message.release()

        return self._start(expected, reduce_all)


def _flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor if tensor.dim() == 1 else tensor.view(-1) for tensor in tensors]


def _copy(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
    for output, source in zip(outputs, inputs, strict=True):
        output.copy_(source)


MAX_UNFINISHED = 8
"""Number of unfinished works of a stream. When another work starts, the oldest are finished if they can be."""


class SharedWork:
    """Handle of an operation in flight, with the interface of torch.distributed's Work.

    Works of one stream end in the order in which they started. The wait of a work also finishes all works before it,
    since the messages of works without a wait would otherwise stay in memory. Several threads may wait.

    Args:
        complete: function that completes the operation.
        expected: messages that it waits for.
        stream: unfinished works of the stream. The work removes itself from it.

    Attributes:
        expected: messages that it waits for.
    """

    def __init__(
        self,
        complete: Callable[[], object],
        expected: Sequence[ExpectedMessage] = (),
        stream: deque[SharedWork] | None = None,
    ) -> None:
        self.expected, self._stream = expected, stream
        self._complete: Callable[[], object] | None = complete
        self._lock = Lock()

    def wait(self) -> None:
        """Wait for the operation. Later calls return at once."""
        for earlier in self._unfinished():
            earlier.finish()
        self.finish()

    def finish(self) -> None:
        """Complete this operation, and no other one. Later calls do nothing."""
        with self._lock:
            if self._complete is None:
                return
            self._complete()
            self._complete = None
            if self._stream is not None:
                self._stream.remove(self)

    def get_future(self) -> Any:
        """Raise an error, as works of gloo's sends and receives do: they have no future.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("messages have no future")

    def _unfinished(self) -> list[SharedWork]:
        """Return the unfinished works of the stream that started before this work."""
        works = [] if self._stream is None or self._complete is None else [*self._stream]
        return works[: works.index(self)] if self in works else []
