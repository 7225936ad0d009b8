"""Every rank's slices of a layer, put together on one of them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.program import Holds, OpKind, Program
from shardlab.rules.pieces import bits


def collect(state: State, slices: Mapping[tuple[int, Holds], Tensor], layer: int, to: int) -> Tensor | None:
    """The complete flat buffer of a layer, on the CPU of rank `to`; None on the others. Every rank calls this.

    Args:
        slices: for each (layer, slices held) that this rank loads, the tensor of these slices.
    """
    mine, device = state.rank == to, state.settings.device
    dtype = torch_dtype(state.settings.precision.parameters)
    flat = torch.empty(state.shapes.flat[layer], dtype=dtype) if mine else None
    for source, holds in _owners(state.checked.program, layer):
        at = 0
        for start, stop in state.shapes.ranges(layer, holds):
            if source == state.rank:
                part = slices[layer, holds][at : at + stop - start]
                if flat is None:
                    dist.send(part.to(device), to)  # it may be kept on the host, where NCCL sends nothing
                else:
                    flat[start:stop] = part
            elif flat is not None:
                place = flat[start:stop]
                given = place if device.type == "cpu" else torch.empty_like(place, device=device)
                dist.recv(given, source)
                if given is not place:
                    place.copy_(given)
            at += stop - start
    return flat


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
