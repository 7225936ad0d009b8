"""The same weights (or gradients) in whole blocks and in the layers of a cut model: copies, exact both ways.

For a layer with k slices a flat buffer may be longer than its layout if its k runs are equally long: only their
beginnings are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shardlab.models.cut import CutModel
from shardlab.models.layout import Cut
from shardlab.models.tensors.flat import named_views


def to_halves(model: CutModel, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Every half-block's flat buffer (layout.numel,), zero in its gaps, from every block's of `model.whole`."""
    by_block = dict(enumerate(wholes))
    return [half_of(model, layer, by_block) for layer in range(model.layers)]


def to_blocks(model: CutModel, halves: Sequence[Tensor]) -> list[Tensor]:
    """Every block's flat buffer of `model.whole`, zero in its gaps, from every half-block's."""
    layouts = [model.whole.layout(block) for block in range(model.whole.layers)]
    wholes = [torch.zeros(layout.numel, dtype=halves[0].dtype, device=halves[0].device) for layout in layouts]
    named = [named_views(layout, flat) for layout, flat in zip(layouts, wholes, strict=True)]
    for layer, flat in enumerate(halves):
        layout = model.layout(layer)
        slices = [named_views(layout, run) for run in flat.chunk(layout.slices)]
        for block, parameter in model.half(layer).sources():
            pieces = [each[parameter.name] for each in slices]
            named[block][parameter.name].copy_(joined(pieces, parameter.shape, parameter.cut))
    return wholes


def half_of(model: CutModel, layer: int, wholes: Mapping[int, Tensor]) -> Tensor:
    """One half-block's flat buffer, from those of the blocks that it takes its parameters from, by number."""
    layout = model.layout(layer)
    named = {block: named_views(model.whole.layout(block), flat) for block, flat in wholes.items()}
    like = next(iter(wholes.values()))
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    for slice, run in enumerate(flat.chunk(layout.slices)):
        mine = named_views(layout, run)
        for block, parameter in model.half(layer).sources():
            whole = named[block][parameter.name]
            mine[parameter.name].copy_(sliced(whole, parameter.cut, slice, layout.slices))
    return flat


def sliced(whole: Tensor, cut: Cut | None, slice: int, of: int) -> Tensor:
    """One of `of` slices of a parameter; a last slice without enough elements gets zeros at its end."""
    if cut is None:
        return whole
    pieces = [_piece(section, cut.dim, slice, of) for section in _sections(whole, cut)]
    return torch.cat(pieces, cut.dim)


def joined(slices: Sequence[Tensor], shape: tuple[int, ...], cut: Cut | None) -> Tensor:
    """The parameter (*shape) from all its slices."""
    if cut is None:
        (whole,) = slices
        return whole
    whole = slices[0].new_empty(shape)
    at = 0
    for section in _sections(whole, cut):
        length = section.shape[cut.dim]
        size = -(-length // len(slices))
        pieces = torch.cat([each.narrow(cut.dim, at, size) for each in slices], cut.dim)
        section.copy_(pieces.narrow(cut.dim, 0, length))
        at += size
    return whole


def _sections(whole: Tensor, cut: Cut) -> list[Tensor]:
    ends = list(accumulate(cut.sections or whole.shape[cut.dim : cut.dim + 1]))
    return [whole.narrow(cut.dim, start, end - start) for start, end in pairwise([0, *ends])]


def _piece(section: Tensor, dim: int, slice: int, of: int) -> Tensor:
    length = section.shape[dim]
    size = -(-length // of)
    longer = section.new_zeros(*section.shape[:dim], of * size, *section.shape[dim + 1 :])
    longer.narrow(dim, 0, length).copy_(section)
    return longer.narrow(dim, slice * size, size)
