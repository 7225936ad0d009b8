"""Transport of a process group of torch.distributed, such as NCCL's or gloo's.

`TorchTransport` calls torch's own collectives. `GlooTransport` sends directly between members where that is faster:
gloo's reduce_scatter sums everything on every rank, its all_gather passes pieces around a ring, and its all_reduce goes
around the ring twice. `benchmarks/messages.py` compares the two ways.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.language import Reduction
from shardlab.language.pass_names import MOST_BYTES_BY_MESSAGES

REDUCE_OP = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MEAN: dist.ReduceOp.AVG,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
}

TAG = 1
"""Tag of the messages that make up collectives. Other messages between the same ranks have torch's default tag, 0."""

_sum_buffers: dict[tuple[torch.dtype, int, int], list[list[Tensor]]] = defaultdict(list)
"""Free receive buffers of small sums, by (dtype, members, elements). They are kept like a communicator's memory, and
are not counted in the memory of a step."""


def sum_buffers() -> list[Tensor]:
    """List the receive buffers of small sums that are kept between steps."""
    return [tensor for free in _sum_buffers.values() for received in free for tensor in received]


class PendingWork:
    """Handle of an operation that consists of several works, with the interface of torch.distributed's Work.

    Args:
        works: works of the operation.
        callback: function that is called once after all works have ended.
    """

    def __init__(self, works: Sequence[Any], callback: Callable[[], object] | None = None) -> None:
        self._works = list(works)
        self._callback = callback

    def wait(self) -> None:
        """Wait for the operation. Later calls return at once."""
        while self._works:
            self._works.pop(0).wait()
        if self._callback is not None:
            self._callback()
            self._callback = None

    def get_future(self) -> Any:
        """Raise an error, as works of gloo's sends and receives do: they have no future.

        Raises:
            RuntimeError: always.
        """
        raise RuntimeError("messages have no future")


class TorchTransport:
    """Collectives and messages of a process group. `Transport` describes the verbs.

    Args:
        group: the process group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._index, self._size = group, group.rank(), group.size()
        self._members: list[int] = dist.get_process_group_ranks(group)

    def all_reduce(self, tensors: Sequence[Tensor], by: Reduction = Reduction.SUM) -> Any:
        return _together(dist.all_reduce(tensor, REDUCE_OP[by], self._group, async_op=True) for tensor in tensors)

    def reduce(self, tensors: Sequence[Tensor], root: int, by: Reduction = Reduction.SUM) -> Any:
        rank = self._members[root]
        return _together(dist.reduce(tensor, rank, REDUCE_OP[by], self._group, async_op=True) for tensor in tensors)

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> Any:
        return _together(dist.broadcast(tensor, self._members[root], self._group, async_op=True) for tensor in tensors)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _together(_all_gather_single(*pair, group=self._group, async_op=True) for pair in pairs)

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], by: Reduction = Reduction.SUM) -> Any:
        pairs, op = zip(outputs, inputs, strict=True), REDUCE_OP[by]
        return _together(_reduce_scatter_single(*pair, op, group=self._group, async_op=True) for pair in pairs)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        pairs = zip(outputs, inputs, strict=True)
        return _together(dist.all_to_all_single(*pair, group=self._group, async_op=True) for pair in pairs)

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Any:
        pieces = [[*whole.chunk(self._size)] for whole in inputs] or [None] * len(outputs)
        pairs, rank = zip(outputs, pieces, strict=True), self._members[root]
        return _together(dist.scatter(*pair, rank, self._group, async_op=True) for pair in pairs)

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Any:
        pieces = [[*whole.chunk(self._size)] for whole in outputs] or [None] * len(inputs)
        pairs, rank = zip(inputs, pieces, strict=True), self._members[root]
        return _together(dist.gather(*pair, rank, self._group, async_op=True) for pair in pairs)

    def barrier(self) -> Any:
        return dist.barrier(self._group, async_op=True)

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Any:
        rank = self._members[to]
        return _together(dist.isend(tensor, rank, self._group, tag) for tensor in tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Any:
        rank = self._members[source]
        return _together(dist.irecv(tensor, rank, self._group, tag) for tensor in tensors)


class GlooTransport(TorchTransport):
    """Collectives of a gloo group, some of them by messages. Sums in group order are bitwise equal on all ranks."""

    def all_reduce(self, tensors: Sequence[Tensor], by: Reduction = Reduction.SUM) -> Any:
        largest_bytes = max((tensor.nbytes for tensor in tensors), default=0) * (self._size - 1)
        if by is not Reduction.SUM or not 0 < largest_bytes <= MOST_BYTES_BY_MESSAGES:
            return super().all_reduce(tensors, by)
        return _together(self._small_sum(tensor.view(-1)) for tensor in tensors)

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        return _together(self._gather_pieces(*pair) for pair in zip(outputs, inputs, strict=True))

    def reduce_scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], by: Reduction = Reduction.SUM) -> Any:
        if by is not Reduction.SUM:
            return super().reduce_scatter(outputs, inputs, by)
        return _together(self._sum_pieces(*pair) for pair in zip(outputs, inputs, strict=True))

    def _small_sum(self, total: Tensor) -> PendingWork:
        """Send the whole tensor to all members, and add up the received tensors."""
        index, size = self._index, self._size
        free = _sum_buffers[total.dtype, size, len(total)]
        received = free.pop() if free else [*total.new_empty((size - 1, len(total)))]
        works = self._exchange(received, [total] * size)

        def add_up() -> None:
            earlier_terms, later_terms = received[:index], received[index:]
            for term in earlier_terms[1:]:
                earlier_terms[0].add_(term)
            for term in (*earlier_terms[:1], *later_terms):
                total.add_(term)
            free.append(received)

        return PendingWork(works, add_up)

    def _gather_pieces(self, output: Tensor, piece: Tensor) -> PendingWork:
        """Send this member's piece to all others."""
        index, pieces, piece = self._index, self._pieces(output), piece.view(-1)
        works = self._exchange([*pieces[:index], *pieces[index + 1 :]], [piece] * self._size)
        pieces[index].copy_(piece)
        return PendingWork(works)

    def _sum_pieces(self, output: Tensor, whole: Tensor) -> PendingWork:
        """Send each member its piece, and add up the received pieces. All but one of these need a buffer."""
        index, size, pieces, total = self._index, self._size, self._pieces(whole), output.view(-1)
        received = [total, *total.new_empty((max(0, size - 2), len(total)))]  # the first piece arrives in the result
        works = self._exchange(received[: size - 1], pieces)

        def add_up() -> None:
            if size == 1:
                total.copy_(pieces[index])
                return
            terms = received[1:]
            terms.insert(max(0, index - 1), pieces[index])
            for term in terms:
                total.add_(term)

        return PendingWork(works, add_up)

    def _pieces(self, whole: Tensor) -> list[Tensor]:
        """Split a tensor, which may be empty, into equal flat pieces."""
        return [*whole.view(self._size, whole.numel() // self._size)]

    def _exchange(self, buffers: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Any]:
        """Start to receive from every other member into its buffer, and to send its piece to each, in group order."""
        others, group = [member for member in range(self._size) if member != self._index], self._group
        receives = [group.recv([buffer], member, TAG) for member, buffer in zip(others, buffers, strict=True)]
        return receives + [group.send([pieces[member]], member, TAG) for member in others]


def torch_transport(group: dist.ProcessGroup) -> TorchTransport:
    """Return the transport of a process group: `GlooTransport` for gloo, else `TorchTransport`."""
    cpu = torch.device("cpu")
    # Asking an NCCL group for its CPU backend raises an error.
    by_messages = cpu in group._device_types and isinstance(group._get_backend(cpu), dist.ProcessGroupGloo)
    return (GlooTransport if by_messages else TorchTransport)(group)


def _together(works: Any) -> Any:
    """Combine the works of several tensors into one."""
    first, *others = works
    return PendingWork([first, *others]) if others else first


def _first(*names: str) -> Callable[..., Any]:
    """Return the first of these functions that this torch has. Torch 2.13 renamed two, and warns about old names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_gather_single = _first("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first("reduce_scatter_single", "reduce_scatter_tensor")
