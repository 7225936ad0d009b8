"""ALL_TO_ALL on tensors: buffers (microbatches * experts, capacity, C), by microbatch and then by expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from shardlab.execute.communicator import Communicator, Wait
from shardlab.execute.state import State
from shardlab.program import Op, Spec
from shardlab.rules.pieces import bits


def all_to_all(
    state: State, links: Communicator, op: Op, members: Sequence[Spec], received: Sequence[Spec]
) -> Callable[[], Wait]:
    """Start the exchange; `members` are the specs that the group's ranks give, `received` those that they receive.

    Equal parts go to all members. Dispatched, each is a member's experts' buffers of all microbatches given; returned,
    it is the buffers that belong to a member's microbatches.
    """
    (given,), (output,), values, group = op.inputs, op.outputs, state.values, op.group
    assert group is not None
    count, mine = len(members), state.specs[given]
    returns = bool(mine.form.slices)
    microbatches = mine.microbatches.bit_count()
    came = [m for member in members for m in bits(member.microbatches)]
    order = sorted(range(len(came)), key=came.__getitem__)
    here = list(bits(mine.microbatches))
    dealt = [here.index(m) for spec in received for m in bits(spec.microbatches)] if returns else []

    def start() -> Wait:
        buffers: torch.Tensor = values[given]
        capacity = buffers.shape[1:]
        if returns:
            if dealt != sorted(dealt):
                buffers = buffers.view(microbatches, -1, *capacity)[dealt].flatten(0, 1)
            inbox = torch.empty_like(buffers, memory_format=torch.contiguous_format)
            wait = links.all_to_all(inbox, buffers.contiguous(), group)
        else:  # the experts of a member lie apart in each microbatch
            parts = buffers.view(microbatches, count, -1, *capacity).transpose(0, 1).contiguous()
            inbox = torch.empty_like(parts)
            wait = links.all_to_all(inbox.flatten(0, 2), parts.flatten(0, 2), group)

        def sort() -> None:
            wait()
            if returns:  # by member, then microbatch, then expert
                apart = inbox.view(count, microbatches // count, -1, *capacity)
                values[output] = apart.transpose(0, 1).reshape(-1, *capacity)
            else:
                apart = inbox.view(count * microbatches, -1, *capacity)
                values[output] = (apart if order == sorted(order) else apart[order]).flatten(0, 1)

        return sort

    return start
