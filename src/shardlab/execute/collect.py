"""Every rank's slices of something, put together on rank 0."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.state import State, torch_dtype
from shardlab.program import Holds, OpKind, Program
from shardlab.rules.pieces import bits


def collect(state: State, slices: Mapping[tuple[int, Holds], Tensor]) -> list[Tensor] | None:
    """The complete flat buffers of all layers, on rank 0's CPU; None on the others.

    Args:
        slices: for each (layer, slices held) that this rank loads, the tensor of these slices.
    """
    whole: list[Tensor] = []
    for layer in range(state.checked.program.layers):
        dtype = torch_dtype(state.settings.precision.parameters)
        flat = torch.empty(state.shapes.flat[layer], dtype=dtype) if state.rank == 0 else None
        for source, holds in _owners(state.checked.program, layer):
            ranges = state.shapes.ranges(layer, holds)
            if state.rank == source != 0:
                dist.send(slices[layer, holds].contiguous(), 0)
            if flat is not None:
                given = slices.get((layer, holds)) if source == 0 else None
                if given is None:
                    length, device = sum(stop - start for start, stop in ranges), state.settings.device
                    given = torch.empty(length, dtype=dtype, device=device)
                    dist.recv(given, source)
                parts = torch.split(given.cpu(), [stop - start for start, stop in ranges])
                for (start, stop), part in zip(ranges, parts, strict=True):
                    flat[start:stop] = part
        if flat is not None:
            whole.append(flat)
    return whole if state.rank == 0 else None


def _owners(program: Program, layer: int) -> list[tuple[int, Holds]]:
    """Ranks and what they hold of a layer, the lowest ranks that together have it whole."""
    loaded = [
        (rank, op.holds)
        for rank, tape in enumerate(program.tapes)
        for op in tape
        if op.kind is OpKind.LOAD_WEIGHT and op.layer == layer and op.holds is not None
    ]
    of = math.lcm(*(holds.of for _, holds in loaded))
    have: set[int] = set()
    owners: list[tuple[int, Holds]] = []
    for rank, holds in loaded:
        pieces = set(bits(holds.refined(of).mask))
        if not pieces <= have:
            have |= pieces
            owners.append((rank, holds))
    return owners
