"""How a layer's weights begin."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlab.models.cutting import CutModel
from shardlab.models.model import Model
from shardlab.models.tensors.flat import views
from shardlab.models.tensors.recutting import layer_of
from shardlab.models.tensors.seeding import generator_of

Initial = Callable[[int, int, Sequence[tuple[int, int]], torch.dtype], Tensor]
"""Reads first weights: given a layer, the length of its flat buffer (layout.numel, or more where runs are lengthened at
their ends), ranges (start, stop) of it and a dtype, their elements one after the other, zero in gaps."""

DEVIATION = 0.02
"""Standard deviation of a matrix's first elements (GPT-2; nanoGPT)."""


def initial_weights(model: Model, layer: int, seed: int, dtype: torch.dtype) -> Tensor:
    """The first weights of a layer (layout.numel,), a function of seed and layer; zero in the gaps.

    As nanoGPT: matrices normal, those that end a residual branch smaller by sqrt(2 layers); biases 0, norms 1.
    Drawn in float64 and rounded, so that runs in two dtypes begin alike. A cut model begins as the whole one does.
    """
    if isinstance(model, CutModel):
        blocks = {block for block, _ in model.run(layer).parameters()} or {0}
        wholes = {block: initial_weights(model.whole, block, seed, dtype) for block in blocks}
        return layer_of(model, layer, wholes)
    layout = model.layout(layer)
    generator = generator_of("weights", seed, layer)
    flat = torch.zeros(layout.numel, dtype=dtype)
    for parameter, view in zip(layout.parameters, views(layout, flat), strict=True):
        if parameter.decayed:
            scale = math.sqrt(2 * model.layers) if parameter.name.endswith("c_proj.weight") else 1
            drawn = torch.empty(parameter.shape, dtype=torch.float64)
            view.copy_(drawn.normal_(0, DEVIATION / scale, generator=generator))
        elif parameter.name.endswith("weight"):
            view.fill_(1)
    return flat
