"""Communication of one rank: collectives and point-to-point operations that start at once and return a wait.

`Communicator` carries out a program's communication, and `make_groups` makes its process groups. Each operation
uses one of three transports:

- shared memory, if all members are neighbours on one host (`shared_transport`);
- on gloo, sends straight from member to member: gloo's reduce_scatter sums everything on every rank, its all_gather
  passes pieces around a ring, and its all_reduce goes around twice, which is two latencies for a small tensor;
- torch.distributed's own collective otherwise.

`benchmarks/messages.py` measures all three.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport import shared_transport
from shardlab.execute.transport.neighbours import Channel, Neighbours
from shardlab.execute.transport.shared_transport import PendingWork
from shardlab.language import Group, Program, Reduction, UserError
from shardlab.language.pass_names import MOST_BYTES_BY_MESSAGES

TAG = 1
"""Tag of these messages. Others between the same ranks have torch's default tag, 0."""

_sum_buffers: dict[tuple[torch.dtype, int, int], list[list[Tensor]]] = defaultdict(list)
"""Free receive buffers of small sums, by (dtype, members, elements). They are kept like a communicator's memory, and no
measurement of a step counts them."""

_CPU = torch.device("cpu")


def retained_buffers() -> list[Tensor]:
    """List memory that communication keeps between steps: receive buffers of small sums, and shared memory."""
    received = [tensor for free in _sum_buffers.values() for came in free for tensor in came]
    return [*received, *Neighbours.memories()]


def all_reduce(tensor: Tensor, by: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> Any:
    """Start to reduce the members' tensors in place.

    A small sum on gloo is in group order, with the same bits on all ranks.

    Returns:
        The work: the result is there when its `wait` has ended, and until then nothing may touch the tensor.
    """
    if by == dist.ReduceOp.SUM and (here := _channel(group)):
        return shared_transport.all_reduce(*here, tensor)
    mine, size = group.rank(), group.size()
    is_small = 0 < (size - 1) * tensor.nbytes <= MOST_BYTES_BY_MESSAGES
    if by != dist.ReduceOp.SUM or not is_small or not _by_messages(group):
        return _all_reduce(tensor, by, group, async_op=True)
    free = _sum_buffers[tensor.dtype, size, tensor.numel()]
    total, came = tensor.view(-1), free.pop() if free else [*tensor.new_empty((size - 1, tensor.numel()))]
    works = _exchange(group, came, [total] * size)

    def add_up() -> None:
        before, after = came[:mine], came[mine:]
        for term in before[1:]:
            before[0].add_(term)
        for term in (*before[:1], *after):
            total.add_(term)
        free.append(came)

    return PendingWork(works, add_up)


def all_gather(output: Tensor, piece: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to gather the members' equal pieces into `output`, in group order.

    Returns:
        The work: the output is whole when its `wait` has ended, and until then the piece must not change.
    """
    mine, size = group.rank(), group.size()
    if here := _channel(group):
        return shared_transport.all_gather(*here, _pieces(output, size), piece.view(-1))
    if not _by_messages(group):
        return _all_gather_single(output, piece, group=group, async_op=True)
    pieces, piece = _pieces(output, size), piece.view(-1)
    works = _exchange(group, [*pieces[:mine], *pieces[mine + 1 :]], [piece] * size)
    pieces[mine].copy_(piece)
    return PendingWork(works)


def reduce_scatter(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to sum the members' tensors; each member receives one of equal pieces of the sum, in group order.

    On gloo, the wait sums the pieces in group order. With more than two members, all pieces but two need buffers.

    Returns:
        The work: the output is there when its `wait` has ended, and until then `whole` must not change.
    """
    mine, size = group.rank(), group.size()
    if here := _channel(group):
        return shared_transport.reduce_scatter(*here, output.view(-1), _pieces(whole, size))
    if not _by_messages(group):
        return _reduce_scatter_single(output, whole, group=group, async_op=True)
    pieces, total = _pieces(whole, size), output.view(-1)
    came = [total, *total.new_empty((max(0, size - 2), len(total)))]  # the first is added to where it arrives
    works = _exchange(group, came[: size - 1], pieces)

    def add_up() -> None:
        if size == 1:
            total.copy_(pieces[mine])
            return
        terms = came[1:]
        terms.insert(max(0, mine - 1), pieces[mine])
        for term in terms:
            total.add_(term)

    return PendingWork(works, add_up)


def all_to_all(output: Tensor, whole: Tensor, group: dist.ProcessGroup) -> Any:
    """Start to send each member one of equal pieces of `whole`, and to receive theirs, in group order.

    Returns:
        The work: the output is whole when its `wait` has ended, and until then `whole` must not change.
    """
    if here := _channel(group):
        outputs, inputs = (_pieces(tensor, group.size()) for tensor in (output, whole))
        return shared_transport.all_to_all(*here, outputs, inputs)
    return dist.all_to_all_single(output, whole, group=group, async_op=True)


def broadcast(tensor: Tensor, root: int, group: dist.ProcessGroup) -> Any:
    """Start to copy the root's tensor to the other members.

    Args:
        root: its rank in the default process group.

    Returns:
        The work: until its `wait` has ended, nothing may touch the tensor.
    """
    if here := _channel(group):
        return shared_transport.broadcast(*here, tensor, root)
    return dist.broadcast(tensor, root, group, async_op=True)


def scatter(output: Tensor, whole: Tensor | None, root: int, group: dist.ProcessGroup) -> Any:
    """Start to send each member one of equal pieces of the root's `whole`, in group order.

    Args:
        whole: None on all but the root.
        root: its rank in the default process group.

    Returns:
        The work: the output is there when its `wait` has ended, and until then `whole` must not change.
    """
    pieces = None if whole is None else [*whole.chunk(group.size())]
    if here := _channel(group):
        return shared_transport.scatter(*here, output, pieces, root)
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
        return shared_transport.gather(*here, pieces, piece, root)
    return dist.gather(piece, pieces, root, group, async_op=True)


def barrier(group: dist.ProcessGroup) -> Any:
    """Start a barrier.

    Returns:
        The work: its `wait` ends when all members have started theirs.
    """
    if here := _channel(group):
        return shared_transport.barrier(*here)
    return dist.barrier(group, async_op=True)


def send(tensor: Tensor, to: int) -> Any:
    """Start to send a tensor to a rank.

    Returns:
        The work: until its `wait` has ended, the tensor must not change.
    """
    here = Neighbours.with_rank(to)
    return dist.isend(tensor, to) if here is None else shared_transport.send(here, tensor, to)


def recv(tensor: Tensor, source: int) -> Any:
    """Start to receive a tensor from a rank.

    Returns:
        The work: the tensor has come when its `wait` has ended.
    """
    here = Neighbours.with_rank(source)
    return dist.irecv(tensor, source) if here is None else shared_transport.recv(here, tensor, source)


def _channel(group: dist.ProcessGroup) -> tuple[Neighbours, Channel] | None:
    """Return the connections and the channel of a group, if all its members share memory; else None."""
    here = Neighbours.here
    channel = None if here is None else here.channel(group)
    return None if here is None or channel is None else (here, channel)


def _pieces(whole: Tensor, size: int) -> list[Tensor]:
    """Split a tensor, which may be empty, into equal flat pieces."""
    return [*whole.view(size, whole.numel() // size)]


def _exchange(group: dist.ProcessGroup, buffers: Sequence[Tensor], pieces: Sequence[Tensor]) -> list[Any]:
    """Start to receive from every other member into its buffer, and to send each its piece, in group order."""
    others = [member for member in range(group.size()) if member != group.rank()]
    receives = [group.recv([buffer], member, TAG) for member, buffer in zip(others, buffers, strict=True)]
    return receives + [group.send([pieces[member]], member, TAG) for member in others]


def _by_messages(group: dist.ProcessGroup) -> bool:
    """Return whether the group is gloo's. Asking an NCCL group for its CPU backend raises an error."""
    return _CPU in group._device_types and isinstance(group._get_backend(_CPU), dist.ProcessGroupGloo)


def _first(*names: str) -> Callable[..., Any]:
    """Return the first of these functions that this torch has. Torch 2.13 renamed two and warns about the old names."""
    return next(getattr(dist, name) for name in names if hasattr(dist, name))


_all_reduce = _first("all_reduce")
_all_gather_single = _first("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _first("reduce_scatter_single", "reduce_scatter_tensor")


Wait = Callable[[], Any]
"""Waits for an operation that has started."""


def wait_of(work: Any) -> Wait:
    """Return the wait of a work of torch.distributed."""
    assert work is not None, "an asynchronous operation gives its work"
    return work.wait


def _nothing() -> None: ...


_REDUCE_OP = {
    Reduction.SUM: dist.ReduceOp.SUM,
    Reduction.MEAN: dist.ReduceOp.AVG,
    Reduction.MIN: dist.ReduceOp.MIN,
    Reduction.MAX: dist.ReduceOp.MAX,
}


class Communicator:
    """Communication of one rank, on a default process group that already exists.

    Args:
        program: the program whose communication is carried out.
        rank: number of the rank.
        groups: process groups that exist already; new ones are added (see `make_groups`).

    Attributes:
        wait_of: turns a work that has started into its wait. A recorder replaces this function.
    """

    def __init__(self, program: Program, rank: int, groups: Groups | None = None) -> None:
        self._groups = make_groups(program, rank, {} if groups is None else groups)
        self._batches: dict[int, int] = {}
        for op in program.tapes[rank]:
            if not self.starts_alone(op.peer, op.batch):
                self._batches[op.batch] = self._batches.get(op.batch, 0) + 1
        self._pending: dict[int, tuple[list[dist.P2POp], list[Wait]]] = {}
        self.wait_of: Callable[[Any], Wait] = wait_of

    def all_reduce(self, tensor: Tensor, group: Group, by: Reduction = Reduction.SUM) -> Wait:
        """Reduce in place."""
        return self._wait(all_reduce(tensor, _REDUCE_OP[by], self._groups[group]))

    def reduce(self, tensor: Tensor, group: Group, root: int, by: Reduction = Reduction.SUM) -> Wait:
        """Reduce in place on the root. The other members' tensors are overwritten with undefined values."""
        return self._wait(dist.reduce(tensor, root, _REDUCE_OP[by], self._groups[group], async_op=True))

    def broadcast(self, tensor: Tensor, group: Group, root: int) -> Wait:
        """Copy the root's tensor to the other members."""
        return self._wait(broadcast(tensor, root, self._groups[group]))

    def scatter(self, output: Tensor, whole: Tensor | None, group: Group, root: int) -> Wait:
        """Receive this member's piece of the root's `whole` into `output`; pieces are equal and in group order."""
        return self._wait(scatter(output, whole, root, self._groups[group]))

    def gather(self, output: Tensor | None, piece: Tensor, group: Group, root: int) -> Wait:
        """Gather the members' equal pieces into the root's `output`, in group order."""
        return self._wait(gather(output, piece, root, self._groups[group]))

    def barrier(self, group: Group) -> Wait:
        """Start a barrier; its wait ends when all members have started theirs."""
        return self._wait(barrier(self._groups[group]))

    def all_gather(self, output: Tensor, piece: Tensor, group: Group) -> Wait:
        """Gather the members' equal pieces into `output`, in group order."""
        return self._wait(all_gather(output, piece, self._groups[group]))

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: Group) -> Wait:
        """Reduce `whole` over the members and receive this member's piece of the sum."""
        return self._wait(reduce_scatter(output, whole, self._groups[group]))

    def all_to_all(self, output: Tensor, whole: Tensor, group: Group) -> Wait:
        """Send equal pieces of `whole` to the members in group order, and receive theirs into `output`."""
        return self._wait(all_to_all(output, whole, self._groups[group]))

    def send(self, tensor: Tensor, to: int, batch: int) -> Wait:
        """Send a tensor, which must not change until the wait has ended."""
        if self.starts_alone(to, batch):
            return self._wait(send(tensor, to))
        return self._batched(dist.isend, tensor, to, batch)

    def recv(self, tensor: Tensor, source: int, batch: int) -> Wait:
        """Receive into a tensor."""
        if self.starts_alone(source, batch):
            return self._wait(recv(tensor, source))
        return self._batched(dist.irecv, tensor, source, batch)

    def starts_alone(self, peer: int, batch: int) -> bool:
        """Return whether a message starts alone, instead of with the others of its batch."""
        return batch < 0 or Neighbours.with_rank(peer) is not None

    def _batched(self, verb: Callable[..., Any], tensor: Tensor, peer: int, batch: int) -> Wait:
        operations, waits = self._pending.setdefault(batch, ([], []))
        operations.append(dist.P2POp(verb, tensor, peer))
        place = len(operations) - 1
        if len(operations) == self._batches[batch]:
            del self._pending[batch]
            waits += [self.wait_of(work) for work in dist.batch_isend_irecv(operations)]

        def wait() -> None:
            mine = min(place, len(waits) - 1)
            waits[mine]()
            if len(waits) > 1:
                waits[mine] = (
                    _nothing  # otherwise this wait keeps the received tensor alive until the others are waited for
                )

        return wait

    def start(self, verb: Callable[..., Any], *tensors: Tensor, group: Group, **settings: Any) -> Wait:
        """Start any function of torch.distributed that takes a group."""
        return self._wait(verb(*tensors, group=self._groups[group], async_op=True, **settings))

    def _wait(self, work: Any) -> Wait:
        return self.wait_of(work)


Groups = dict[Group, dist.ProcessGroup | None]
"""Process groups that exist, by their ranks; None for groups of other ranks."""


def make_groups(program: Program, rank: int, known: Groups) -> dict[Group, dist.ProcessGroup]:
    """Make a program's process groups. Every rank of the program calls this.

    Programs may use fewer ranks than there are processes, except on NCCL. Torch names a group by its members and by the
    number of groups that each has made before. So a rank without a group to make in a round makes one of itself alone,
    and all counts stay equal, also for the next program. With NCCL's `device_id`, torch also splits every group off
    from the world's communicator, in which each process must take part.

    Args:
        program: the program.
        rank: number of this rank.
        known: groups that exist already, the same on all ranks of the program. New groups are added to it.

    Returns:
        The groups of which the rank is a member.

    Raises:
        UserError: for a group that is not in ascending order, if this torch can only make groups that are.
    """
    for groups in group_rounds(program, known):
        mine = next((group for group in groups if rank in group.ranks), None)
        ranks = [rank] if mine is None else list(mine.ranks)
        group = _new_group(ranks)
        known |= dict.fromkeys(groups)
        if mine is not None:
            known[mine] = group
    return {group: made for group, made in known.items() if made is not None}


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Make the process group of these ranks, in this order, which decides the piece of each rank.

    Torch sorts the ranks by default. Versions without `sort_ranks` always do.
    """
    new_group = cast(Any, dist.new_group)
    order: dict[str, bool] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(new_group).parameters:
            named = ", ".join(map(str, ranks))
            raise UserError(
                f"the ranks {named} meet in this order, but torch {torch.__version__} makes groups in ascending order "
                "alone; name the ranks of `among` in ascending order, or use a newer torch"
            )
        order["sort_ranks"] = False
    group = new_group(list(ranks), timeout=_limit(), use_local_synchronization=True, **order)
    assert isinstance(group, dist.ProcessGroup), f"this rank is not in {ranks}"
    return group


def _limit() -> timedelta:
    """Return the timeout of the default group. Torch has another default for new groups."""
    world: Any = dist.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    return dist.default_pg_timeout if options is None else options._timeout  # torch's backend for tests has none


def group_rounds(program: Program, known: Collection[Group] = ()) -> list[list[Group]]:
    """Split a program's unknown groups into rounds without a common member; every rank gets the same rounds."""
    groups = {op.group for tape in program.tapes for op in tape if op.group is not None} - set(known)
    made: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: (group.axis, group.ranks)):
        members = set(group.ranks)
        free = (others for others in made if all(members.isdisjoint(other.ranks) for other in others))
        others = next(free, None)
        if others is None:
            made.append([group])
        else:
            others.append(group)
    return made
