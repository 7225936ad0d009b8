"""Text from a trained model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardlab.errors import UserError
from shardlab.models.model import Model
from shardlab.models.tensors.flat import views, with_borrowed
from shardlab.models.tensors.layers import layers_of
from shardlab.models.tensors.seeding import generator_of


@torch.no_grad()
def generate(model: Model, flats: Sequence[Tensor], prompt: Tensor, count: int, seed: int) -> Tensor:
    """Continue a prompt (length,) by `count` tokens drawn from the model: (length + count,), int64.

    Args:
        flats: each layer's complete flat weights.
        seed: the tokens drawn are a function of it, the weights and the prompt.
    """
    if prompt.numel() == 0:
        raise UserError("the prompt is empty; text is continued from at least one token")
    layers = layers_of(model)
    parameters = with_borrowed(model, [views(model.layout(layer), flat) for layer, flat in enumerate(flats)])
    generator = generator_of("generate", seed)
    text = torch.cat([prompt, prompt.new_zeros(count)])
    for end in range(len(prompt), len(text)):
        x = text[None, max(0, end - model.seq_len) : end]
        for layer, weights in zip(layers, parameters, strict=True):
            x = layer(weights, x)
        text[end] = torch.multinomial(x[0, -1].double().softmax(-1).cpu(), 1, generator=generator)
    return text
