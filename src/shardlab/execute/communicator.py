"""The tape's communication on torch.distributed. Every call starts at once and gives back how to wait for it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardlab.execute import collectives
from shardlab.execute.groups import Groups, make_groups
from shardlab.execute.neighbours import Neighbours
from shardlab.program import Group, Program, Reduction

Wait = Callable[[], Any]


def wait_of(work: Any) -> Wait:
    """How to wait for what torch.distributed has started."""
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
    """One rank's communication, on a default process group that already exists.

    Args:
        program: the tapes.
        rank: whose.
        groups: where groups are kept for further programs of the same processes (see `make_groups`).

    Attributes:
        wait_of: makes of every communication that has started how to wait for it; a recorder puts its own here.
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
        return self._wait(collectives.all_reduce(tensor, _REDUCE_OP[by], self._groups[group]))

    def reduce(self, tensor: Tensor, group: Group, root: int, by: Reduction = Reduction.SUM) -> Wait:
        """Reduce in place on the root; the others' tensors are written over with something else."""
        return self._wait(dist.reduce(tensor, root, _REDUCE_OP[by], self._groups[group], async_op=True))

    def broadcast(self, tensor: Tensor, group: Group, root: int) -> Wait:
        """The root's tensor into the others'."""
        return self._wait(collectives.broadcast(tensor, root, self._groups[group]))

    def scatter(self, output: Tensor, whole: Tensor | None, group: Group, root: int) -> Wait:
        """Equal pieces of the root's `whole` into `output`, in group order."""
        return self._wait(collectives.scatter(output, whole, root, self._groups[group]))

    def gather(self, output: Tensor | None, piece: Tensor, group: Group, root: int) -> Wait:
        """The members' equal pieces into the root's `output`, in group order."""
        return self._wait(collectives.gather(output, piece, root, self._groups[group]))

    def barrier(self, group: Group) -> Wait:
        """Nothing is moved; the wait ends when all members have come."""
        return self._wait(collectives.barrier(self._groups[group]))

    def all_gather(self, output: Tensor, piece: Tensor, group: Group) -> Wait:
        """The members' equal pieces into `output`, in group order."""
        return self._wait(collectives.all_gather(output, piece, self._groups[group]))

    def reduce_scatter(self, output: Tensor, whole: Tensor, group: Group) -> Wait:
        """This member's piece of the sum."""
        return self._wait(collectives.reduce_scatter(output, whole, self._groups[group]))

    def all_to_all(self, output: Tensor, whole: Tensor, group: Group) -> Wait:
        """Equal pieces of `whole` to the members in group order, and theirs for this one into `output`."""
        return self._wait(collectives.all_to_all(output, whole, self._groups[group]))

    def send(self, tensor: Tensor, to: int, batch: int) -> Wait:
        """Send; the tensor must not change until the wait is over."""
        if self.starts_alone(to, batch):
            return self._wait(collectives.send(tensor, to))
        return self._batched(dist.isend, tensor, to, batch)

    def recv(self, tensor: Tensor, source: int, batch: int) -> Wait:
        """Receive into `tensor`."""
        if self.starts_alone(source, batch):
            return self._wait(collectives.recv(tensor, source))
        return self._batched(dist.irecv, tensor, source, batch)

    def starts_alone(self, peer: int, batch: int) -> bool:
        """Whether a message needs no others of its batch to start."""
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
                waits[mine] = _nothing  # or what came would live for as long as the others are waited for

        return wait

    def start(self, verb: Callable[..., Any], *tensors: Tensor, group: Group, **settings: Any) -> Wait:
        """Any verb of torch.distributed that takes a group."""
        return self._wait(verb(*tensors, group=self._groups[group], async_op=True, **settings))

    def _wait(self, work: Any) -> Wait:
        return self.wait_of(work)
