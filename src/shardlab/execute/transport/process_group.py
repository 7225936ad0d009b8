"""Shared memory as a backend of torch.distributed, so that PyTorch's own parallelisms can use it.

    register_backend()
    group = torch.distributed.new_group(backend=BACKEND)

`SharedProcessGroup` implements the methods of c10d by the verbs of `SharedTransport`. A work is completed by the thread
that waits for it. DDP asks for a work's future at once, so it waits for each bucket during the backward pass.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportIncompatibleMethodOverride=false, reportAssignmentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport.neighbours import Neighbours
from shardlab.execute.transport.shared_transport import SharedTransport
from shardlab.execute.transport.torch_transport import REDUCE_OP, PendingWork
from shardlab.language import Reduction

BACKEND = "shardlab"
"""Name of the backend."""


def register_backend() -> None:
    """Register the backend with torch.distributed. Later calls in the same process do nothing.

    A group of this backend shares memory if its members are connected neighbours (`connect_neighbours`), and uses gloo
    otherwise.
    """
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create_group, extended_api=True, devices=["cpu"])


def _create_group(options: Any, _: object) -> Any:
    members = list(options.global_ranks_in_group) or list(range(options.group_size))
    neighbours = Neighbours.among(members)
    if neighbours is None:
        return dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
    return SharedProcessGroup(
        options.group_id, SharedTransport(neighbours, f"c10d {options.group_id}", members), options
    )


class SharedGroupWork(dist.Work):
    """Handle of a c10d operation.

    Args:
        work: handle of the transport's operation, or several handles.
        results: tensors of the result.
    """

    def __init__(self, work: Any, results: Sequence[Any]) -> None:
        super().__init__()
        self._work, self._results, self._completed = work, results, False

    def wait(self, timeout: object = None) -> bool:
        """Wait for the operation. The argument is ignored: the timeout of the connections applies."""
        self._work.wait()
        self._completed = True
        return True

    def is_completed(self) -> bool:
        """Return whether the operation has been waited for."""
        return self._completed

    def get_future(self) -> Any:
        """Wait, and return a completed future."""
        self.wait()
        future = torch.futures.Future()
        future.set_result(self._results)
        return future

    def result(self) -> Any:
        """Return the tensors of the result."""
        return self._results


class SharedProcessGroup(dist.ProcessGroup):
    """Process group on shared memory. The methods are those of c10d's ProcessGroup.

    Sums are computed in group order. All pieces of a call have the same size.
    """

    def __init__(self, name: str, transport: SharedTransport, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)  # pyright: ignore[reportCallIssue]
        self._name, self._transport = name, transport

    @property
    def group_name(self) -> str:
        """Name by which DTensor finds the group."""
        return self._name

    def getBackendName(self) -> str:
        return BACKEND

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return SharedGroupWork(self._transport.all_reduce(_detached(tensors), _reduction(opts)), tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        return SharedGroupWork(self._transport.reduce(_detached(tensors), opts.rootRank, _reduction(opts)), tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        return SharedGroupWork(self._transport.broadcast(_detached(tensors), opts.rootRank), tensors)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        return SharedGroupWork(self._transport.all_gather(_detached(outputs), _detached(inputs)), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def all_gather_single(self, output: Tensor, piece: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [piece])

    _allgather_base = all_gather_single

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        wholes = _wholes(outputs)
        work = self._transport.all_gather(wholes, _detached(inputs))
        return SharedGroupWork(PendingWork([work], lambda: _split(wholes, outputs)), outputs)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        work = self._transport.reduce_scatter(_detached(outputs), _detached(inputs), _reduction(opts))
        return SharedGroupWork(work, outputs)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [whole], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        return self.reduce_scatter_single_coalesced(outputs, _wholes(inputs), opts)

    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_sizes: Sequence[int], input_sizes: Sequence[int], opts: Any = None
    ) -> dist.Work:
        if len({*output_sizes, *input_sizes}) > 1:
            sizes = f"{list(input_sizes)} and {list(output_sizes)} rows"
            raise NotImplementedError(
                f"the {BACKEND} backend sends equal pieces in an all_to_all, not {sizes}; use gloo"
            )
        return SharedGroupWork(self._transport.all_to_all(_detached([output]), _detached([whole])), [output])

    alltoall_base = all_to_all_single

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        return SharedGroupWork(self._transport.scatter(_detached(outputs), _wholes(inputs), opts.rootRank), outputs)

    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        wholes = _wholes(outputs)
        work = self._transport.gather(wholes, _detached(inputs), opts.rootRank)
        return SharedGroupWork(PendingWork([work], lambda: _split(wholes, outputs)), outputs)

    def barrier(self, opts: Any = None) -> dist.Work:
        return SharedGroupWork(self._transport.barrier(), [])

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        return SharedGroupWork(self._transport.send(_detached(tensors), to, tag), tensors)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> dist.Work:
        return SharedGroupWork(self._transport.recv(_detached(tensors), source, tag), tensors)


def _detached(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors detached from autograd."""
    return [tensor.detach() for tensor in tensors]


def _wholes(lists: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Concatenate the pieces of each list into a new flat tensor."""
    return [torch.cat([piece.detach().flatten() for piece in pieces]) for pieces in lists]


def _split(wholes: Sequence[Tensor], outputs: Sequence[Sequence[Tensor]]) -> None:
    """Copy each whole tensor into a list of pieces."""
    for whole, pieces in zip(wholes, outputs, strict=True):
        for piece, place in zip(whole.chunk(len(pieces)), pieces, strict=True):
            place.detach().copy_(piece.view(place.shape))


def _reduction(opts: Any) -> Reduction:
    """Return the reduction of a call.

    Raises:
        NotImplementedError: if shared memory does not support it.
    """
    op = dist.ReduceOp.SUM if opts is None else opts.reduceOp
    for reduction, torch_op in REDUCE_OP.items():
        if op == torch_op:  # torch's comparison is not symmetric
            return reduction
    raise NotImplementedError(
        f"the {BACKEND} backend reduces with SUM, AVG, MIN or MAX, not with {getattr(op, 'op', op)}; use gloo"
    )
