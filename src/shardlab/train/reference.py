"""Training on one device, written as one would without Shardlab: what every strategy must agree with."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.execute import AdamW, Sampler
from shardlab.models import LayerLayout, Model
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, loss_of, views, with_borrowed


@dataclass(frozen=True)
class Reference:
    """What one device computed.

    Attributes:
        losses: mean loss of each step.
        gradients: for each step and layer the flat gradient.
        weights: for each layer the flat weights after the last step.
    """

    losses: list[float]
    gradients: list[list[Tensor]]
    weights: list[Tensor]


def train_reference(
    model: Model,
    batches: Sampler,
    microbatches: int,
    steps: int,
    seed: int,
    dtype: torch.dtype,
    config: AdamW,
    trained: Sequence[Tensor] | None = None,
) -> Reference:
    """Plain autograd through all layers, one AdamW over all parameters, one microbatch after the other.

    Args:
        trained: for each layer, like its flat weights, 1 where parameters are trained and 0 where they are frozen
            (None: all are trained).
    """
    layouts = [model.layout(layer) for layer in range(model.layers)]
    flats = [initial_weights(model, layer, seed, dtype) for layer in range(model.layers)]
    parameters = [
        [view.detach().requires_grad_() for view in views(layout, flat)]
        for layout, flat in zip(layouts, flats, strict=True)
    ]
    named = [
        (tensor, parameter.decayed)
        for layout, tensors, moves in zip(layouts, parameters, trained or map(torch.ones_like, flats), strict=True)
        for parameter, tensor, its in zip(layout.parameters, tensors, views(layout, moves), strict=True)
        if its.any()
    ]
    optimizer = torch.optim.AdamW(
        [
            {"params": [t for t, decayed in named if decayed], "weight_decay": config.weight_decay},
            {"params": [t for t, decayed in named if not decayed], "weight_decay": 0.0},
        ],
        betas=config.betas,
        eps=config.eps,
    )
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for step in range(steps):
        optimizer.zero_grad()
        mean = torch.zeros((), dtype=torch.float64)
        for microbatch in range(microbatches):
            x, targets = batches.microbatch(step, microbatch)
            layers = zip(layers_of(model), with_borrowed(model, parameters), strict=True)
            for number, (layer, weights) in enumerate(layers):
                dropout = Dropout(model.dropout, seed, step, number, (microbatch,))
                x = layer(weights, x, dropout, Share(of_step=microbatches))
            loss = loss_of(x, targets) / batches.counted(step, microbatches)
            loss.backward()
            mean += loss.detach()
        gradients.append([_flat_gradient(layout, ps) for layout, ps in zip(layouts, parameters, strict=True)])
        losses.append(float(mean))
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_([tensor for tensor, _ in named], config.clip)
        for group in optimizer.param_groups:
            group["lr"] = config.rate(step)
        optimizer.step()
    return Reference(losses, gradients, flats)


def _flat_gradient(layout: LayerLayout, parameters: list[Tensor]) -> Tensor:
    flat = torch.zeros(layout.numel, dtype=parameters[0].dtype)
    for view, parameter in zip(views(layout, flat), parameters, strict=True):
        assert parameter.grad is not None
        view.copy_(parameter.grad)
    return flat
