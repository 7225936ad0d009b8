"""Weights (or gradients) in whole blocks, and the same in the layers of a cut model: copies, exact both ways.

For a layer with k slices a flat buffer may be longer than its layout if its k runs are equally long: only their
beginnings are read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from shardlab.models.cutting import CutModel
from shardlab.models.layout import Cut, Parameter
from shardlab.models.model import Model
from shardlab.models.run import Run
from shardlab.models.tensors.flat import named_views


def to_layers(model: CutModel, wholes: Sequence[Tensor]) -> list[Tensor]:
    """Every layer's flat buffer (layout.numel,), zero in its gaps, from every block's of `model.whole`."""
    by_block = dict(enumerate(wholes))
    return [layer_of(model, layer, by_block) for layer in range(model.layers)]


def to_blocks(model: CutModel, layers: Sequence[Tensor]) -> list[Tensor]:
    """Every block's flat buffer of `model.whole`, zero in its gaps, from every layer's."""
    layouts = [model.whole.layout(block) for block in range(model.whole.layers)]
    wholes = [torch.zeros(layout.numel, dtype=layers[0].dtype, device=layers[0].device) for layout in layouts]
    named = [named_views(layout, flat) for layout, flat in zip(layouts, wholes, strict=True)]
    for layer, flat in enumerate(layers):
        for block, parameter, whole in whole_parameters(model, layer, flat):
            named[block][parameter.name].copy_(whole)
    return wholes


def whole_parameters(model: Model, layer: int, flat: Tensor) -> Iterator[tuple[int, Parameter, Tensor]]:
    """A layer's parameters in whole, one after the other, each with its block: views of the flat buffer of a layer that
    is not sliced.
    """
    layout, run = model.layout(layer), model.run(layer)
    slices = [named_views(layout, its) for its in flat.chunk(layout.slices)]
    for block, parameter in run.parameters():
        if layout.slices == 1:
            yield block, parameter, slices[0][parameter.name]
            continue
        whole = flat.new_empty(parameter.shape)
        for slice, mine in enumerate(slices):
            _put(whole, mine[parameter.name], cuts_of(run, parameter, slice))
        yield block, parameter, whole


def layer_of(model: CutModel, layer: int, wholes: Mapping[int, Tensor]) -> Tensor:
    """One layer's flat buffer, from those of the blocks that it takes its parameters from, by number."""
    layout, run = model.layout(layer), model.run(layer)
    named = {block: named_views(model.whole.layout(block), flat) for block, flat in wholes.items()}
    like = next(iter(wholes.values()))
    flat = torch.zeros(layout.numel, dtype=like.dtype, device=like.device)
    for slice, its in enumerate(flat.chunk(layout.slices)):
        mine = named_views(layout, its)
        for block, parameter in run.parameters():
            _take(mine[parameter.name], named[block][parameter.name], cuts_of(run, parameter, slice))
    return flat


def cuts_of(run: Run, parameter: Parameter, slice: int) -> list[tuple[Cut, int]]:
    """How a parameter is cut, each with the number of the piece that a slice of the layer has."""
    numbers = run.numbers(slice)
    return [(cut, numbers[parameter.indices[cut.dim]]) for cut in parameter.cuts(run.own_pieces)]


def _take(piece: Tensor, whole: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece from the whole; the last one gets zeros at its end where there is nothing left."""
    for cut, number in cuts:
        whole = whole.index_select(cut.dim, places_of(whole.shape[cut.dim], cut, number))
    piece[tuple(slice(length) for length in whole.shape)] = whole


def _put(whole: Tensor, piece: Tensor, cuts: Sequence[tuple[Cut, int]]) -> None:
    """Copy a piece to its place in the whole."""
    places = {cut.dim: places_of(whole.shape[cut.dim], cut, number) for cut, number in cuts}
    every = [places.get(dim, torch.arange(length)) for dim, length in enumerate(whole.shape)]
    here = tuple(slice(len(each)) for each in every)
    whole[torch.meshgrid(*every, indexing="ij")] = piece[here]


def places_of(length: int, cut: Cut, number: int) -> Tensor:
    """Where the elements of piece `number` stand along the dim that is cut."""
    places: list[Tensor] = []
    start = 0
    for section in cut.sections or (length,):
        size = -(-section // cut.pieces)
        places.append(start + torch.arange(min(number * size, section), min((number + 1) * size, section)))
        start += section
    return torch.cat(places)
