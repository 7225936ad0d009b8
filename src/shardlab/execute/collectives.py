"""Communication of single tensors that starts at once: among neighbours through memory that they share; else torch's
own; on gloo, by messages straight from member to member.

Gloo's reduce_scatter sums everything on every rank, its all_gather hands pieces on around a ring, and its all_reduce
goes around twice, which for a small tensor is two latencies. `benchmarks/messages.py` measures all three ways.
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

from shardlab.execute import shared_messages
from shardlab.execute.messages import Messages
from shardlab.execute.neighbours import Channel, Neighbours
from shardlab.program.ways import BY_MESSAGES

TAG = 1
"""What tells these messages from others between the same ranks, which have torch's default, 0."""

_rooms: dict[tuple[torch.dtype, int, int], list[list[Tensor]]] = defaultdict(list)
"""By (dtype, members, elements), what small sums received into and use no more: it stays, as a communicator's memory
does, and is in no account of a step."""

_CPU = torch.device("cpu")


def rooms() -> list[Tensor]:
    """List what small sums have received into and use no more, and what neighbours share."""
    received = [tensor for free in _rooms.values() for came in free for tensor in came]
    return [*received, *Neighbours.memories()]


def all_reduce(tensor: Tensor, by: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Any:
    """Start to reduce what the members give, in place; a small sum on gloo is in group order, alike on all to the bit.

    Returns:
        The work: the result is there when its `wait` has ended, and until then nothing may touch the tensor.
    """
    if by == dist.ReduceOp.SUM and (here := _channel(group)):
        return shared_messages.all_reduce(*here, tensor)
    mine, size = group.rank(), group.size()
    is_small = 0 < (size - 1) * tensor.nbytes <= BY_MESSAGES
    if by != dist.ReduceOp.SUM or not is_small or not _by_messages(group):
        return _all_reduce(tensor, by, group, async_op=True)
    free = _rooms[tensor.dtype, size, tensor.numel()]
    total, came = tensor.view(-1), free.pop() if free else [*tensor.new_empty((size - 1, tensor.numel()))]
    works = _exchanged(group, came, [total] * size)

    def add_up() -> None:
        before, after = came[:mine], came[mine:]
        for term in before[1:]:
            before[0].add_(term)
        for term in (*before[:1], *after):
            total.add_(term)
        free.append(came)

    return Messages(works, add_up)


def all_gather(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to gather the members' equal pieces into `output`, in group order.

    Returns:
        The work: the output is whole when its `wait` has ended, and until then the piece must not change.
    """
    mine, size = group.rank(), group.size()
    if here := _channel(group):
        return shared_messages.all_gather(*here, _pieces(output, size), piece.view(-1))
    if not _by_messages(group):
        return _all_gather_single(output, piece, group=group, async_op=True)
    pieces, piece = _pieces(output, size), piece.view(-1)
    works = _exchanged(group, [*pieces[:mine], *pieces[mine + 1 :]], [piece] * size)
    pieces[mine].copy_(piece)
    return Messages(works)


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to sum what the members give, each of which receives one of equal pieces of the sum, in group order.

    On gloo the rank that waits for a piece sums it, in group order. Of more than two members it holds the pieces of all
    but two beside the result until then.

    Returns:
        The work: the output is there when its `wait` has ended, and until then `whole` must not change.
    """
    mine, size = group.rank(), group.size()
    if here := _channel(group):
        return shared_messages.reduce_scatter(*here, output.view(-1), _pieces(whole, size))
    if not _by_messages(group):
        return _reduce_scatter_single(output, whole, group=group, async_op=True)
    pieces, total = _pieces(whole, size), output.view(-1)
    came = [total, *total.new_empty((max(0, size - 2), len(total)))]  # the first is added to where it arrives
    works = _exchanged(group, came[: size - 1], pieces)

    def add_up() -> None:
        if size == 1:
            total.copy_(pieces[mine])
            return
        terms = came[1:]
        terms.insert(max(0, mine - 1), pieces[mine])
        for term in terms:
            total.add_(term)

    return Messages(works, add_up)


def all_to_all(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to give each member one of equal pieces of `whole`, and to take theirs, in group order.

    Returns:
        The work: the output is whole when its `wait` has ended, and until then `whole` must not change.
    """
    if here := _channel(group):
        taken, given = (_pieces(tensor, group.size()) for tensor in (output, whole))
        return shared_messages.all_to_all(*here, taken, given)
    return dist.all_to_all_single(output, whole, group=group, async_op=True)


def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> Any:
    """Start to bring the root's tensor into the others'.

    Args:
        root: its rank in the default process group.

    Returns:
        The work: until its `wait` has ended, nothing may touch the tensor.
    """
    if here := _channel(group):
        return shared_messages.broadcast(*here, tensor, root)
    return dist.broadcast(tensor, root, group, async_op=True)


def scatter(output: Tensor, whole: Tensor | None, root: int, group: dist.ProcessGroup) -> Any:
    """Start to give each member one of equal pieces of the root's `whole`, in group order.

    Args:
        whole: None on all but the root.
        root: its rank in the default process group.

    Returns:
        The work: the output is there when its `wait` has ended, and until then `whole` must not change.
    """
    pieces = None if whole is None else [*whole.chunk(group.size())]
    if here := _channel(group):
        return shared_messages.scatter(*here, output, pieces, root)
    return dist.scatter(output, pieces, root, group, async_op=True)


def gather(output: Tensor | None, piece: Tensor, root: int, group: dist.ProcessGroup) -> Any:
    """Start to gather the members' equal pieces into the root's `output`, in group order.

    Args:
        output: None on all but the root.
        root: its rank in the default process group.

    Returns:
        The work: the output is whole when its `wait` has ended, and until then the piece must not change.
    """
    pieces = None if output is None else [*output.chunk(group.size())]
    if here := _channel(group):
        return shared_messages.gather(*here, pieces, piece, root)
    return dist.gather(piece, pieces, root, group, async_op=True)


def barrier(group: dist.ProcessGroup) -> Any:
    """Start to meet the other members.

    Returns:
        The work: its `wait` ends when all have come.
    """
    if here := _channel(group):
        return shared_messages.barrier(*here)
    return dist.barrier(group, async_op=True)


def send(tensor: Tensor, to: int) -> Any:
    """Start to send a tensor to a rank.

    Returns:
        The work: until its `wait` has ended, the tensor must not change.
    """
    here = Neighbours.with_rank(to)
    return dist.isend(tensor, to) if here is None else shared_messages.send(here, tensor, to)


def recv(tensor: Tensor, source: int) -> Any:
    """Start to receive a tensor from a rank.

    Returns:
        The work: the tensor has come when its `wait` has ended.
    """
    here = Neighbours.with_rank(source)
    return dist.irecv(tensor, source) if here is None else shared_messages.recv(here, tensor, source)


def _channel(group: dist.ProcessGroup) -> tuple[Neighbours, Channel] | None:
    """How the members share memory, if all of them do."""
    here = Neighbours.here
    channel = None if here is None else here.channel(group)
    return None if here is None or channel is None else (here, channel)


def _pieces(whole: Tensor, size: int) -> list[Tensor]:
    """Equal pieces of a tensor, each flat; it may have no elements."""
    return [*whole.view(size, whole.numel() // size)]


def _exchanged(group: dist.ProcessGroup, rooms: Sequence[Tensor], given: Sequence[Tensor]) -> list[Any]:
    """Start a message from and to every other member: into its room, in group order, and of what each is given."""
    others = [member for member in range(group.size()) if member != group.rank()]
    receives = [group.recv([room], member, TAG) for member, room in zip(others, rooms, strict=True)]
    return receives + [group.send([given[member]], member, TAG) for member in others]


def _by_messages(group: dist.ProcessGroup) -> bool:
    """Whether the group is gloo's. One of NCCL's has no backend for the CPU, and torch raises when asked for it."""
    return _CPU in group._device_types and isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)


def _first(*names: str) -> Callable[..., Any]:
    """Find the first of these functions that this torch has: 2.13 renamed two of them, and warns at the old names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_reduce = _first("all_reduce")
_all_gather_single = _first("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first("reduce_scatter_single", "reduce_scatter_tensor")
