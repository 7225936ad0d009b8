"""Calls of each collective on one tensor, and their results for small integers on real ranks.

`CALLS` lists the collectives, with the tensors of their members. `shardlab collectives show` prints the result of
`show_rank`, and `shardlab bench collectives` times the same calls.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.transport.collectives import Handle, Transport, messages_with, transport_of
from shardlab.language import Reduction

Part = Literal["", "whole", "piece"]
"""Part of a tensor that a member has: nothing, the whole tensor, or one piece."""


class Tensors(NamedTuple):
    """Arguments of one member's call of a collective. The lists have at most one tensor."""

    inputs: list[Tensor]
    outputs: list[Tensor]
    root: int
    by: Reduction


@dataclass(frozen=True)
class Call:
    """Call of a collective, and the tensors that its members need for it.

    Attributes:
        start: function that starts the collective.
        gives, receives: part of a tensor that each member sends and receives.
        root_gives, root_receives: whether only the root sends or receives.
        in_place: whether the result overwrites the input.
    """

    start: Callable[[Transport, Tensors], Handle]
    gives: Part = ""
    receives: Part = ""
    root_gives: bool = False
    root_receives: bool = False
    in_place: bool = False


CALLS: dict[str, Call] = {
    "broadcast": Call(lambda t, x: t.broadcast(x.outputs, x.root), "whole", "whole", root_gives=True, in_place=True),
    "scatter": Call(lambda t, x: t.scatter(x.outputs, x.inputs, x.root), "whole", "piece", root_gives=True),
    "gather": Call(lambda t, x: t.gather(x.outputs, x.inputs, x.root), "piece", "whole", root_receives=True),
    "reduce": Call(lambda t, x: t.reduce(x.inputs, x.root, x.by), "whole", "whole", root_receives=True, in_place=True),
    "all_reduce": Call(lambda t, x: t.all_reduce(x.outputs, x.by), "whole", "whole", in_place=True),
    "all_gather": Call(lambda t, x: t.all_gather(x.outputs, x.inputs), "piece", "whole"),
    "reduce_scatter": Call(lambda t, x: t.reduce_scatter(x.outputs, x.inputs), "whole", "piece"),
    "all_to_all": Call(lambda t, x: t.all_to_all(x.outputs, x.inputs), "whole", "whole"),
    "barrier": Call(lambda t, x: t.barrier()),
}
"""Each collective by its name."""

BARRIER, SEND = "barrier", "send"


def prepare(
    name: str, group: dist.ProcessGroup, input_tensor: Tensor | None, whole: Tensor, root: int, by: Reduction
) -> tuple[Tensor | None, Callable[[], Handle]]:
    """Prepare one member's call of a collective, which can then be repeated.

    Args:
        name: name of the collective, from `CALLS`.
        group: the members.
        input_tensor: input of this member; None if it has none.
        whole: any tensor with the size, dtype and device of a whole tensor.
        root: index of the root.
        by: reduction of reduce and all_reduce.

    Returns:
        This member's result (None if it has none), and the function that starts a call.
    """
    call, is_root = CALLS[name], group.rank() == root
    inputs = [] if input_tensor is None else [input_tensor]
    outputs: list[Tensor] = []
    if call.receives and (is_root or not call.root_receives):
        elements = len(whole) // (group.size() if call.receives == "piece" else 1)
        outputs = inputs if call.in_place and inputs else [whole.new_empty(elements)]
    transport, tensors = transport_of(group), Tensors(inputs, outputs, root, by)
    return next(iter(outputs), None), lambda: call.start(transport, tensors)


Numbers = list[float] | None
"""Numbers of a rank's tensor; None if the rank has no tensor."""

APART = 0.02
"""Seconds between the arrivals of two ranks at a barrier."""


@dataclass(frozen=True)
class TensorStates:
    """Tensors of all ranks before and after each of some collectives.

    Attributes:
        steps: names of the collectives, in the order in which they ran.
        tensors: tensors of all ranks, in rank order, before the first step and after each step. For a barrier, the
            times at which each rank arrived and continued, in milliseconds since the first arrival.
    """

    steps: tuple[str, ...]
    tensors: list[list[Numbers]]

    @property
    def inputs(self) -> list[Numbers]:
        return self.tensors[0]

    @property
    def results(self) -> list[Numbers]:
        return self.tensors[-1]


@dataclass(frozen=True)
class Member:
    """Rank of a world whose collectives are shown.

    Attributes:
        rank, ranks: number of this rank, and number of ranks.
        device: device of the rank's tensors.
        root: root of the collectives that have one.
        by: operation of the collectives that reduce.
    """

    rank: int
    ranks: int
    device: torch.device
    root: int
    by: Reduction

    def tensor(self, part: Part) -> Tensor:
        """Return this rank's tensor or piece. Element i of rank r is 10 r + i (100 r + i on more than 10 ranks)."""
        unit = 10 if self.ranks <= 10 else 100
        whole = torch.arange(float(self.ranks), device=self.device) + unit * self.rank
        return whole if part == "whole" else whole[self.rank : self.rank + 1].clone()

    def first(self, name: str) -> Tensor | None:
        """Return this rank's input of the first collective of a case (see `show_rank`); None if it has none."""
        gives, only_root = ("whole", True) if name == SEND else (CALLS[name].gives, CALLS[name].root_gives)
        return self.tensor(gives) if self.rank == self.root or not only_root else None

    def run(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Run a collective, and return this rank's result."""
        if name == SEND:
            return self._send(tensor)
        world = dist.group.WORLD
        assert world is not None, "the default process group exists"
        received, start = prepare(name, world, tensor, self.tensor("whole"), self.root, self.by)
        start().wait()
        return received

    def _send(self, input_tensor: Tensor | None) -> Tensor | None:
        """Send the root's tensor to the rank after it."""
        to = (self.root + 1) % self.ranks
        if input_tensor is not None:
            messages_with(to).send([input_tensor], to).wait()
            return input_tensor
        if self.rank != to:
            return None
        tensor = torch.empty_like(self.tensor("whole"))
        messages_with(self.root).recv([tensor], self.root).wait()
        return tensor


def show_rank(
    rank: int, device: torch.device, cases: Sequence[tuple[str, ...]], root: int, by: Reduction
) -> list[TensorStates] | None:
    """Run one rank's part of all cases.

    A case is a sequence of collectives. The result of each one is the input of the next.

    Returns:
        The tensors of all ranks on rank 0, None on the other ranks.
    """
    member = Member(rank, dist.get_world_size(), device, root, by)
    own_states = [_times(member) if case == (BARRIER,) else _tensors(member, case) for case in cases]
    everyone: list[Any] | None = [None] * member.ranks if rank == 0 else None
    dist.gather_object(own_states, everyone)
    if everyone is None:
        return None
    return [
        TensorStates(case, [list(column) for column in zip(*(states[index] for states in everyone), strict=True)])
        for index, case in enumerate(cases)
    ]


def _tensors(member: Member, case: Sequence[str]) -> list[Numbers]:
    tensor = member.first(case[0])
    tensors = [_numbers(tensor)]
    for name in case:
        tensor = member.run(name, tensor)
        tensors.append(_numbers(tensor))
    return tensors


def _numbers(tensor: Tensor | None) -> Numbers:
    return None if tensor is None else [float(number) for number in tensor.cpu()]


def _times(member: Member) -> list[Numbers]:
    """Let the ranks arrive at a barrier in turn, and return the times in milliseconds since the first arrival."""
    member.run(BARRIER, None)
    time.sleep(APART * member.rank)
    arrival = time.time()
    member.run(BARRIER, None)
    departure = time.time()
    first = torch.tensor([arrival], dtype=torch.float64, device=member.device)
    dist.all_reduce(first, dist.ReduceOp.MIN)
    return [[1000 * (moment - first.item())] for moment in (arrival, departure)]
