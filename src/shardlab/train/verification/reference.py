"""Training on one device, written in plain PyTorch. Every strategy must agree with it."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardlab.execute.optimizers.flat_slice import torch_optimizers
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Sampler, torch_dtype
from shardlab.language.precision import Precision
from shardlab.models import Model
from shardlab.models.layout import Parameter
from shardlab.models.tensors import (
    Dropout,
    Share,
    add_borrowed,
    cross_entropy,
    initial_weights,
    make_layers,
    parameter_views,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Reference:
    """Results of one device.

    Attributes:
        losses: mean loss of each step.
        gradients: for each step, the flat gradient of each layer.
        weights: flat weights of each layer after the last step.
        averages: moving average of the flat weights of each layer; empty without `ema`.
    """

    losses: list[float]
    gradients: list[list[Tensor]]
    weights: list[Tensor]
    averages: list[Tensor]

    @property
    def all(self) -> list[list[Tensor]]:
        """Gradients of each step, then the weights, then their averages if there are any."""
        return [*self.gradients, self.weights, *([self.averages] if self.averages else [])]


def train_reference(
    model: Model,
    batches: Sampler,
    microbatches: Sequence[int],
    seed: int,
    precision: Precision,
    config: OptimizerConfig,
    trained: Sequence[Tensor] | None = None,
    device: torch.device = CPU,
) -> Reference:
    """Train a model on one device: autograd through all layers, one microbatch after the other.

    Args:
        model: model, not split into the layers of a program.
        batches: training data.
        microbatches: number of microbatches of each step. Its length is the number of steps.
        seed: seed of weights and dropout.
        precision: data types of the parameters, their gradients, and the optimizer's copy of the parameters.
        config: settings of the optimizer.
        trained: mask of each layer, in the shape of its flat weights: 1 for trained parameters, 0 for frozen ones
            (None: all are trained).
        device: device that computes.

    Returns:
        The results, on the CPU.
    """
    layouts = [model.layout(layer) for layer in range(model.layers)]

    def first_weights(dtype: str) -> list[Tensor]:
        layer_weights = (initial_weights(model, layer, seed, torch_dtype(dtype)) for layer in range(model.layers))
        return [flat.to(device) for flat in layer_weights]

    flats = first_weights(precision.parameters)
    exact = first_weights(precision.state) if precision.copy else flats
    parameters = [
        [view.detach().requires_grad_() for view in parameter_views(layout, flat)]
        for layout, flat in zip(layouts, flats, strict=True)
    ]
    sums = [torch.zeros_like(flat, dtype=torch_dtype(precision.gradients)) for flat in flats]
    updated: list[tuple[Tensor, Tensor]] = []
    roles: list[list[Tensor]] = [[], [], []]
    moving = map(torch.ones_like, flats) if trained is None else trained
    for layout, copy, total, moves in zip(layouts, exact, sums, moving, strict=True):
        of_layer = zip(
            layout.parameters,
            parameter_views(layout, copy),
            parameter_views(layout, total),
            parameter_views(layout, moves),
            strict=True,
        )
        for parameter, tensor, gradient, mask in of_layer:
            if not mask.any():
                continue
            pair, role = ([tensor], [gradient]), 0 if parameter.decayed else 1
            if config.optimizer == "muon" and parameter.hidden_matrix:
                pair, role = (_matrices(tensor, parameter), _matrices(gradient, parameter)), 2
            updated += zip(*pair, strict=True)
            roles[role] += pair[0]
    optimizers = torch_optimizers(replace(config, ema=None), *roles, fused=False)
    moving_sums, total_weight = [torch.zeros_like(copy) for copy in exact], 0.0
    losses: list[float] = []
    gradients: list[list[Tensor]] = []
    for step, count in enumerate(microbatches):
        for total in sums:
            total.zero_()
        mean = torch.zeros((), dtype=torch.float64)
        for microbatch in range(count):
            x, targets = (token_ids.to(device) for token_ids in batches.microbatch(step, microbatch))
            layers = zip(make_layers(model), add_borrowed(model, parameters), strict=True)
            for number, (layer, weights) in enumerate(layers):
                dropout = Dropout(model.dropout, seed, step, number, (microbatch,))
                x = layer(weights, x, dropout, Share(step_microbatches=count))
            loss = cross_entropy(x, targets) / batches.counted(step, count)
            loss.backward()
            mean += loss.detach().cpu()
            for layout, total, leaves in zip(layouts, sums, parameters, strict=True):
                _add_gradients(parameter_views(layout, total), leaves)
        gradients.append([total.to(CPU, copy=True) for total in sums])
        losses.append(float(mean))
        for tensor, gradient in updated:
            tensor.grad = gradient.to(tensor.dtype, copy=True)
        if config.clip is not None:
            torch.nn.utils.clip_grad_norm_([tensor for tensor, _ in updated], config.clip)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.rate(step)
            optimizer.step()
        for flat, copy in zip(flats, exact, strict=True):
            flat.copy_(copy)
        if config.ema is not None:
            total_weight = config.ema * total_weight + 1
            for total, copy in zip(moving_sums, exact, strict=True):
                total.mul_(config.ema).add_(copy)
    averages = (
        []
        if config.ema is None
        else [(total / total_weight).to(CPU, flat.dtype) for total, flat in zip(moving_sums, flats, strict=True)]
    )
    return Reference(losses, gradients, [flat.cpu() for flat in flats], averages)


def _matrices(tensor: Tensor, parameter: Parameter) -> list[Tensor]:
    """Return the matrices of a parameter that Muon updates separately.

    There is one for each expert and each section of the rows, such as queries and keys (Jordan 2024).
    """
    matrices: Sequence[Tensor] = tensor.view(-1, *parameter.shape[-2:]).unbind()
    lengths = list(parameter.sections) or [parameter.shape[-2]]
    return [part for matrix in matrices for part in torch.split(matrix, lengths)]


def _add_gradients(sums: list[Tensor], parameters: list[Tensor]) -> None:
    """Add the gradients of a microbatch to the sums, and clear them."""
    for total, parameter in zip(sums, parameters, strict=True):
        assert parameter.grad is not None
        total.add_(parameter.grad)
        parameter.grad = None
