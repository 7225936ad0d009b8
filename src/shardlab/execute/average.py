"""Averages of weights over the steps of a training (EMA), kept like an optimizer's state and evaluated like weights."""

# pyright: reportUnknownMemberType=false, reportUnknownParameterType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.functional import TensorOptimizer
from shardlab.execute.places import tensor_at
from shardlab.program import Holds, OpKind

if TYPE_CHECKING:
    from shardlab.execute.state import State

Ranges = Sequence[tuple[int, int]]


class Average(TensorOptimizer):
    """Follows tensors instead of moving them: the mean of what each was after its steps, the latest counting most.

    What a tensor was n steps ago counts decay ** n; that the first steps have fewer before them is corrected as in Adam
    (Kingma and Ba 2015, arXiv 1412.6980, section 3), so the first weights of a run do not count.
    """

    def __init__(self, params: Sequence[Tensor], decay: float) -> None:
        super().__init__([{"params": params}], decay=decay)

    @torch.no_grad()
    def step(self) -> None:
        """Take the tensors as they are now into their averages."""
        for group in self.param_groups:
            decay = group["decay"]
            for tensor in group["params"]:
                state = self.state[tensor]
                if not state:
                    state["step"], state["average"] = 0, tensor.clone()
                state["step"] += 1
                state["average"].lerp_(tensor, (1 - decay) / (1 - decay ** state["step"]))

    def of(self, tensor: Tensor) -> Tensor:
        """A tensor's average; itself before the first step."""
        return self.state[tensor]["average"] if self.state.get(tensor) else tensor


@contextmanager
def averaged(state: State) -> Generator[None, None, None]:
    """Put averages in the place of the weights that this rank keeps, for as long as the block takes.

    Each rank has the averages of the slices that it steps, and is given those of the others that it keeps as well. All
    ranks enter together.
    """
    places, device = state.analysis.kept.places, state.settings.device
    weights = {
        key: tensor_at(places[key], kept.shape, kept.dtype, device).copy_(kept) for key, kept in state.kept.items()
    }
    try:
        _fill(state)
        yield
    finally:
        for key, kept in state.kept.items():
            kept.copy_(weights[key])


def _fill(state: State) -> None:
    """Write every average where its slices are kept, from a rank that has it to those that have not."""
    shapes, stepped = state.shapes, [_of_kind(state, rank, OpKind.UPDATE) for rank in range(dist.get_world_size())]
    loaded = [_of_kind(state, rank, OpKind.LOAD_WEIGHT) for rank in range(dist.get_world_size())]
    for layer, holds in dict.fromkeys(key for keys in stepped for key in keys if shapes.flat[key[0]]):
        ranges = shapes.ranges(layer, holds)
        mine = (layer, holds) in stepped[state.rank]
        average = _average(state, layer, holds) if mine else None
        lacking = any(
            _common(ranges, shapes.ranges(layer, kept))
            for its, steps in zip(loaded, stepped, strict=True)
            for of, kept in its
            if of == layer and (layer, holds) not in steps
        )
        if lacking:
            if average is None:
                dtype = getattr(torch, state.settings.precision.state)
                average = torch.empty(sum(b - a for a, b in ranges), dtype=dtype, device=state.settings.device)
            dist.broadcast(average, next(rank for rank, steps in enumerate(stepped) if (layer, holds) in steps))
        if average is not None:
            for (of, kept), tensor in state.kept.items():
                if of == layer:
                    for here, there, length in _common(shapes.ranges(layer, kept), ranges):
                        tensor[here : here + length] = average[there : there + length]


def _average(state: State, layer: int, holds: Holds) -> Tensor:
    """The average of slices that this rank steps, on the device; before the first step the weights as they are kept."""
    stepped, owner = state.opt_states[layer, holds], state.analysis.kept.owner(layer, holds)
    if owner is not None:  # updates are given copies of what is kept elsewhere, and these are gone
        kept = state.kept[owner]
        stepped.carry([kept[start:stop] for start, stop in state.shapes.places(layer, owner[1], holds)])
    return stepped.average.to(state.settings.device)


def _of_kind(state: State, rank: int, kind: OpKind) -> list[tuple[int, Holds]]:
    """(layer, slices) of what a rank loads, or of what it steps."""
    tape, specs = state.checked.program.tapes[rank], state.checked.specs[rank]
    values = (specs[op.inputs[2] if kind is OpKind.UPDATE else op.outputs[0]] for op in tape if op.kind is kind)
    return [(spec.layer, spec.holds) for spec in values]


def _common(a: Ranges, b: Ranges) -> list[tuple[int, int, int]]:
    """What two tensors of runs of one buffer have in common: where it begins in each, and how long it is."""
    found: list[tuple[int, int, int]] = []
    here = 0
    for start, stop in a:
        there = 0
        for begin, end in b:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                found.append((here + first - start, there + first - begin, last - first))
            there += end - begin
        here += stop - start
    return found
