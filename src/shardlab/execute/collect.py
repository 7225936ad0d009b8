"""Weights across ranks: gather a layer on one rank, and replace weights by their averages.

`gather_layer` serves checkpoints and sampling. `averaged_weights` serves evaluation with an exponential moving average
(EMA): each rank has the averages of the slices that it updates, and the averages that another rank lacks are broadcast.
Every rank calls both functions.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check import Checked
from shardlab.execute.offload import tensor_at
from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.language import Holds, OpKind, Program
from shardlab.language.rules.kinds import bits

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges (start, stop) of a layer's flat buffer."""


def gather_layer(state: State, slices: Mapping[tuple[int, Holds], Tensor], layer: int, to: int) -> Tensor | None:
    """Gather the complete flat buffer of a layer on one rank. Every rank calls this.

    Args:
        state: this rank's tensors.
        slices: weights that this rank loads in a step, by (layer, slices held).
        layer: number of the layer.
        to: rank that receives the buffer.

    Returns:
        The buffer, (elements,), on the CPU of rank `to`; None on the other ranks.
    """
    receives, device = state.rank == to, state.settings.device
    dtype = torch_dtype(state.settings.precision.parameters)
    flat = torch.empty(state.shapes.flat[layer], dtype=dtype) if receives else None
    for source, holds in _owners(state.checked.program, layer):
        offset = 0
        for start, stop in state.shapes.ranges(layer, holds):
            if source == state.rank:
                part = slices[layer, holds][offset : offset + stop - start]
                if flat is None:
                    dist.send(part.to(device), to)  # the part may be on the host, from which NCCL cannot send
                else:
                    flat[start:stop] = part
            elif flat is not None:
                place = flat[start:stop]
                buffer = place if device.type == "cpu" else torch.empty_like(place, device=device)
                dist.recv(buffer, source)
                if buffer is not place:
                    place.copy_(buffer)
            offset += stop - start
    return flat


@contextmanager
def averaged_weights(state: State) -> Generator[None, None, None]:
    """Replace this rank's weights by their moving averages inside of the context.

    A rank has the averages of the slices that it updates, and receives the averages of its other slices. All ranks
    enter the context together.
    """
    places, device = state.analysis.kept_weights.place_of, state.settings.device
    weights = {
        key: tensor_at(places[key], weight.shape, weight.dtype, device).copy_(weight)
        for key, weight in state.kept.items()
    }
    try:
        _write_averages(state)
        yield
    finally:
        for key, weight in state.kept.items():
            weight.copy_(weights[key])


def slices_of(checked: Checked, rank: int, kind: OpKind) -> list[tuple[int, Holds]]:
    """Return (layer, slices) of all weights that a rank loads, or of all optimizer states that it updates.

    Args:
        kind: LOAD_WEIGHT or UPDATE.
    """
    tape, specs = checked.program.tapes[rank], checked.specs[rank]
    values = (specs[op.inputs[2] if kind is OpKind.UPDATE else op.outputs[0]] for op in tape if op.kind is kind)
    return list(dict.fromkeys((spec.layer, spec.holds) for spec in values))


def _owners(program: Program, layer: int) -> list[tuple[int, Holds]]:
    """Return (rank, slices that the rank loads) of the lowest ranks that together load the whole layer."""
    loads = [
        (rank, op.holds)
        for rank, tape in enumerate(program.tapes)
        for op in tape
        if op.kind is OpKind.LOAD_WEIGHT and op.layer == layer and op.holds is not None
    ]
    slices = math.lcm(*(holds.of for _, holds in loads))
    covered_pieces: set[int] = set()
    owners: list[tuple[int, Holds]] = []
    for rank, holds in loads:
        pieces = set(bits(holds.refined(slices).mask))
        if not pieces <= covered_pieces:
            covered_pieces |= pieces
            owners.append((rank, holds))
    return owners


def _write_averages(state: State) -> None:
    """Overwrite the kept weights with their averages. An average that some rank lacks is broadcast to all ranks."""
    shapes, ranks = state.shapes, range(dist.get_world_size())
    updated_slices, loaded_slices = (
        [slices_of(state.checked, rank, kind) for rank in ranks] for kind in (OpKind.UPDATE, OpKind.LOAD_WEIGHT)
    )
    for layer, holds in dict.fromkeys(key for keys in updated_slices for key in keys if shapes.flat[key[0]]):
        ranges = shapes.ranges(layer, holds)
        average = _average_of(state, layer, holds) if (layer, holds) in updated_slices[state.rank] else None
        some_rank_lacks_it = any(
            _overlaps(ranges, shapes.ranges(layer, other_holds))
            for rank in ranks
            for other_layer, other_holds in loaded_slices[rank]
            if other_layer == layer and (layer, holds) not in updated_slices[rank]
        )
        if some_rank_lacks_it:
            if average is None:
                dtype = getattr(torch, state.settings.precision.state)
                average = torch.empty(sum(b - a for a, b in ranges), dtype=dtype, device=state.settings.device)
            dist.broadcast(average, next(rank for rank in ranks if (layer, holds) in updated_slices[rank]))
        if average is not None:
            for (other_layer, other_holds), tensor in state.kept.items():
                if other_layer == layer:
                    for target, source, length in _overlaps(shapes.ranges(layer, other_holds), ranges):
                        tensor[target : target + length] = average[source : source + length]


def _average_of(state: State, layer: int, holds: Holds) -> Tensor:
    """Return the average of slices that this rank updates, on the device. Before the first step, it is the weights."""
    optimizer, owner = state.opt_states[layer, holds], state.analysis.kept_weights.memory_of(layer, holds)
    if owner is not None:  # the last update may have used copies of the weights, which have been freed
        weight = state.kept[owner]
        optimizer.carry([weight[start:stop] for start, stop in state.shapes.places(layer, owner[1], holds)])
    return optimizer.average.to(state.settings.device)


def _overlaps(a: Ranges, b: Ranges) -> list[tuple[int, int, int]]:
    """Return (start in the first tensor, start in the second, length) of each run of elements that two tensors share.

    Args:
        a: ranges of the flat buffer that the first tensor stores, in order.
        b: ranges that the second tensor stores, in order.
    """
    overlaps: list[tuple[int, int, int]] = []
    offset_a = 0
    for start, stop in a:
        offset_b = 0
        for begin, end in b:
            first, last = max(start, begin), min(stop, end)
            if first < last:
                overlaps.append((offset_a + first - start, offset_b + first - begin, last - first))
            offset_b += end - begin
        offset_a += stop - start
    return overlaps
