"""Communication of one rank: collectives and messages that start at once and return a handle.

`Transport` lists the verbs. It has two implementations: shared memory among the ranks of one host
(`shared_transport`), and the process groups of torch.distributed (`torch_transport`). `transport_of` chooses one for a
group. `Communicator` holds the transports of a program, and `make_groups` makes its process groups.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport.neighbours import Neighbours
from shardlab.execute.transport.shared_transport import SharedTransport
from shardlab.execute.transport.torch_transport import TorchTransport, sum_buffers, torch_transport
from shardlab.language import Group, Op, OpKind, Program, Reduction, UserError

T = TypeVar("T")


class Handle(Protocol):
    """Operation in flight, with the interface of torch.distributed's Work."""

    def wait(self) -> object:
        """Wait for the operation. Until then, its outputs must not be read or written, and its inputs must not change.

        Raises:
            RuntimeError: if a participating rank has ended, or does not start the operation within the time limit.
        """
        ...


class Transport(Protocol):
    """Interface by which the members of a group send each other tensors. Every verb returns a handle at once.

    All members start the same collectives in the same order. A verb acts on each tensor of a list; the lists of all
    members have tensors of the same shapes and dtypes, contiguous, in the same order. A *whole* tensor consists of one
    equal piece for each member, in group order. Members are given by their index in the group.
    """

    def all_reduce(self, tensors: Sequence[Tensor], by: Reduction = Reduction.SUM) -> Handle:
        """Reduce in place. The results of all members are bitwise equal."""
        ...

    def reduce(self, tensors: Sequence[Tensor], root: int, by: Reduction = Reduction.SUM) -> Handle:
        """Reduce in place on the root. The other members' tensors may be overwritten with undefined values."""
        ...

    def broadcast(self, tensors: Sequence[Tensor], root: int) -> Handle:
        """Copy the root's tensors to the other members."""
        ...

    def all_gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Handle:
        """Gather the members' pieces `inputs` into whole `outputs`."""
        ...

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], by: Reduction = Reduction.SUM
    ) -> Handle:
        """Reduce whole `inputs`. Each member gets its piece of the result."""
        ...

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Handle:
        """Send each member its piece of whole `inputs`, and receive one from each into whole `outputs`."""
        ...

    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Handle:
        """Send each member its piece of the root's whole `inputs`, which are empty lists on the others."""
        ...

    def gather(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], root: int) -> Handle:
        """Gather the members' pieces into the root's whole `outputs`, which are empty lists on the others."""
        ...

    def barrier(self) -> Handle:
        """Start a barrier. Its wait ends when all members have started it."""
        ...

    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> Handle:
        """Send tensors to one member. Messages of one tag arrive in the order in which they were sent."""
        ...

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int = 0) -> Handle:
        """Receive tensors from one member."""
        ...


def transport_of(group: dist.ProcessGroup) -> Transport:
    """Return the transport of a group: shared memory if all members are connected neighbours, else torch's."""
    members = dist.get_process_group_ranks(group)
    neighbours = Neighbours.among(members)
    return torch_transport(group) if neighbours is None else SharedTransport(neighbours, group.group_name, members)


def messages_with(peer: int) -> Transport:
    """Return the transport of messages between this rank and `peer`. Its group is the world, not these two ranks."""
    neighbours = Neighbours.among([dist.get_rank(), peer])
    if neighbours is not None:
        return SharedTransport(neighbours, "messages", range(dist.get_world_size()))
    world = dist.group.WORLD
    assert world is not None, "the default process group exists"
    return TorchTransport(world)


def gather_objects(item: T) -> list[T]:
    """Return the object of each rank, by rank. Every rank calls this."""
    items = [item] * dist.get_world_size()
    dist.all_gather_object(items, item)
    return items


def retained_buffers() -> list[Tensor]:
    """List the memory that communication keeps between steps: receive buffers of small sums, and shared memory."""
    return [*sum_buffers(), *Neighbours.memories()]


Wait = Callable[[], Any]
"""Function that waits for an operation in flight."""


def wait_of(work: Handle | None) -> Wait:
    """Return the function that waits for a torch.distributed work."""
    assert work is not None, "an asynchronous operation gives its work"
    return work.wait


class Communicator:
    """Communication of one rank, on a default process group that already exists.

    Args:
        program: program whose ops communicate.
        rank: number of the rank.
        groups: process groups that exist already; new ones are added (see `make_groups`).

    Attributes:
        transports: transport of each group that this rank belongs to.
        wait_of: function from a work in flight to the function that waits for it. A recorder replaces it.
    """

    def __init__(self, program: Program, rank: int, groups: Groups | None = None) -> None:
        own_groups = make_groups(program, rank, {} if groups is None else groups)
        self.transports: dict[Group, Transport] = {
            group: transport_of(torch_group) for group, torch_group in own_groups.items()
        }
        tape = program.tapes[rank]
        peers = {op.peer for op in tape if op.kind in (OpKind.SEND, OpKind.RECV)}
        self._messages = {peer: messages_with(peer) for peer in peers}
        self._batches = Counter(op.batch for op in tape if not self.starts_alone(op.peer, op.batch))
        self._pending: dict[int, tuple[list[dist.P2POp], list[Wait]]] = {}
        self.wait_of: Callable[[Any], Wait] = wait_of

    def group_of(self, op: Op) -> tuple[Group, Transport]:
        """Return the group of a collective, and the group's transport."""
        assert op.group is not None
        return op.group, self.transports[op.group]

    def send(self, tensor: Tensor, to: int, batch: int) -> Wait:
        """Send a tensor to a rank. The tensor must not change until the wait has ended."""
        if self.starts_alone(to, batch):
            return self.wait_of(self._messages[to].send([tensor], to))
        return self._batched(dist.isend, tensor, to, batch)

    def recv(self, tensor: Tensor, source: int, batch: int) -> Wait:
        """Receive a rank's message into a tensor."""
        if self.starts_alone(source, batch):
            return self.wait_of(self._messages[source].recv([tensor], source))
        return self._batched(dist.irecv, tensor, source, batch)

    def starts_alone(self, peer: int, batch: int) -> bool:
        """Return whether a message is started alone rather than together with its batch."""
        return batch < 0 or isinstance(self._messages.get(peer), SharedTransport)

    def _batched(self, verb: Callable[..., Any], tensor: Tensor, peer: int, batch: int) -> Wait:
        operations, waits = self._pending.setdefault(batch, ([], []))
        operations.append(dist.P2POp(verb, tensor, peer))
        place = len(operations) - 1
        if len(operations) == self._batches[batch]:
            del self._pending[batch]
            waits += [self.wait_of(work) for work in dist.batch_isend_irecv(operations)]

        def wait() -> None:
            index = min(place, len(waits) - 1)
            waits[index]()
            if len(waits) > 1:
                waits[index] = lambda: None  # releases the received tensor, which this wait would otherwise keep alive

        return wait


Groups = dict[Group, dist.ProcessGroup | None]
"""Existing process groups, by their ranks; None for groups to which this rank does not belong."""


def make_groups(program: Program, rank: int, process_groups: Groups) -> dict[Group, dist.ProcessGroup]:
    """Create a program's process groups. Every rank of the program calls this.

    Programs may use fewer ranks than there are processes, except on NCCL. Torch names a group by its members and by the
    number of groups that each member has created before. A rank that belongs to no group of a round (see
    `group_rounds`) therefore creates a group of itself, so that all counts stay equal, also for the next program. With
    NCCL's `device_id`, torch also splits every group off from the world's communicator, so every process must take
    part.

    Args:
        program: the program.
        rank: number of this rank.
        process_groups: groups that exist already, equal on all ranks of the program. New groups are added to it.

    Returns:
        The groups that the rank belongs to.

    Raises:
        UserError: for a group that is not in ascending order, if this version of torch only supports ascending groups.
    """
    for groups in group_rounds(program, process_groups):
        own_group = next((group for group in groups if rank in group.ranks), None)
        ranks = [rank] if own_group is None else list(own_group.ranks)
        group = _new_group(ranks)
        process_groups |= dict.fromkeys(groups)
        if own_group is not None:
            process_groups[own_group] = group
    return {group: process_group for group, process_group in process_groups.items() if process_group is not None}


def _new_group(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Create the process group of some ranks in this order, which determines the piece of each rank.

    Torch sorts the ranks by default. Versions without `sort_ranks` always do.
    """
    new_group = cast(Any, dist.new_group)
    order: dict[str, bool] = {}
    if list(ranks) != sorted(ranks):
        if "sort_ranks" not in signature(new_group).parameters:
            text = ", ".join(map(str, ranks))
            raise UserError(
                f"a group has the ranks {text} in this order, but torch {torch.__version__} only supports ascending "
                "ranks; name the ranks of `among` in ascending order, or use a newer torch"
            )
        order["sort_ranks"] = False
    group = new_group(list(ranks), timeout=_limit(), use_local_synchronization=True, **order)
    assert isinstance(group, dist.ProcessGroup), f"this rank is not in {ranks}"
    return group


def _limit() -> timedelta:
    """Return the timeout of the default group. Torch has another default for new groups."""
    world: Any = dist.group.WORLD
    options = world._get_backend(world._device_types[0]).options
    return dist.default_pg_timeout if options is None else options._timeout  # torch's fake backend has no options


def group_rounds(program: Program, existing_groups: Collection[Group] = ()) -> list[list[Group]]:
    """Split a program's new groups into rounds of disjoint groups. Every rank returns the same rounds."""
    groups = {op.group for tape in program.tapes for op in tape if op.group is not None} - set(existing_groups)
    rounds: list[list[Group]] = []
    for group in sorted(groups, key=lambda group: (group.axis, group.ranks)):
        members = set(group.ranks)
        free = (others for others in rounds if all(members.isdisjoint(other.ranks) for other in others))
        others = next(free, None)
        if others is None:
            rounds.append([group])
        else:
            others.append(group)
    return rounds
