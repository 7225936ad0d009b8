"""Where each parameter of a whole model lies in the flat buffers of a plan's layers, written down and read again.

A checkpoint has this of the plan that wrote it, so that no other plan, and no later version, has to make that plan's
layers again in order to read it.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab.execute.shapes import Shapes
from shardlab.models import Model
from shardlab.models.layout import Cut
from shardlab.models.tensors.recutting import cuts_of, places_of


def written_pieces(model: Model, shapes: Shapes) -> list[dict[str, Any]]:
    """Describe the layers of a model, whole or cut, for a JSON file: how long each is, and the pieces in it."""
    return [
        {"length": shapes.flat[layer], "pieces": list(_pieces(model, layer, shapes.flat[layer]))}
        for layer in range(model.layers)
    ]


def _pieces(model: Model, layer: int, length: int) -> Sequence[dict[str, Any]]:
    layout, run = model.layout(layer), model.run(layer)
    wholes = {whole.name: (block, whole) for block, whole in run.parameters()}
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for slice in range(layout.slices):
        for piece, offset in zip(layout.parameters, layout.offsets, strict=True):
            block, whole = wholes[piece.name]
            cuts = [(*cut, number) for cut, number in cuts_of(run, whole, slice)]
            found.setdefault(  # slices that have the same of a parameter have the same numbers
                (piece.name, *cuts),
                {
                    "block": block,
                    "name": piece.name,
                    "whole": whole.shape,
                    "shape": piece.shape,
                    "start": slice * (length // layout.slices) + offset,
                    "cuts": cuts,
                },
            )
    return list(found.values())


class ParameterPiece(NamedTuple):
    """A part of a parameter in a layer's buffer, row after row.

    Attributes:
        layer, start: the buffer, and the element at which it begins.
        rows, columns: of each matrix here, with those that fill it up.
        numbers: of the whole parameter's matrices, rows and columns that are here, ascending.
    """

    layer: int
    start: int
    rows: int
    columns: int
    numbers: tuple[Tensor, Tensor, Tensor]


def read_pieces(layers: Sequence[Mapping[str, Any]]) -> dict[tuple[int, str], list[ParameterPiece]]:
    """The pieces of each parameter, by block and name."""
    found: dict[tuple[int, str], list[ParameterPiece]] = defaultdict(list)
    for layer, written in enumerate(layers):
        for piece in written["pieces"]:
            numbers = [torch.arange(length) for length in piece["whole"]]
            for dim, pieces, sections, number in piece["cuts"]:
                numbers[dim] = places_of(piece["whole"][dim], Cut(dim, pieces, tuple(sections)), number)
            one, vector = torch.arange(1), len(numbers) == 1
            shape = [*piece["shape"], 1] if vector else piece["shape"]
            numbers = [*numbers, one] if vector else numbers
            experts, rows, columns = [one, *numbers] if len(numbers) == 2 else numbers
            at = ParameterPiece(layer, piece["start"], shape[-2], shape[-1], (experts, rows, columns))
            found[piece["block"], piece["name"]].append(at)
    return found
