"""What the models' tests share: a measurement of what autograd keeps for a layer, by storages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardlab.models import ExpertLayers, Model
from shardlab.models.tensors import Dropout, Share, initial_weights, layers_of, views
from shardlab.models.tensors.parts import ALL
from shardlab.program.sizes import LayerKind


def inputs_of(model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = ALL) -> tuple[Tensor | None, ...]:
    """Random inputs of a layer: of a norm the residual (but for the first) and the branch, of a share's tokens."""
    shape = model.activation_shape(layer)
    if share.tokens is not None:
        shape = (len(share.tokens), *shape[1:])
    if layer == 0:
        tokens = torch.randint(model.vocabulary, (rows, *shape))
        return (None, tokens) if model.kinds[0] is LayerKind.DENSE else (tokens,)
    if isinstance(model, ExpertLayers):
        return _inputs_of_expert_layers(model, layer, rows, dtype)
    x = torch.randn(rows, *shape, dtype=dtype).requires_grad_()
    if model.kinds[layer] is not LayerKind.NORM:
        return (x,)
    return (None if layer == 1 else torch.randn_like(x).requires_grad_(), x)


def _inputs_of_expert_layers(
    model: ExpertLayers, layer: int, rows: int, dtype: torch.dtype
) -> tuple[Tensor | None, ...]:
    """Random buffers; for a dense layer also a residual stream with the gates and different experts for each token."""
    buffers = torch.randn(model.buffers_shape(rows), dtype=dtype).requires_grad_()
    if model.kinds[layer] is LayerKind.EXPERTS:
        return (buffers,)
    experts, top_k = model.whole.experts, model.whole.top_k
    carried = torch.rand(rows, model.block, model.residual_width, dtype=dtype)
    carried[..., -top_k:] = torch.rand(rows, model.block, experts).argsort(-1)[..., :top_k]
    return carried.requires_grad_(), buffers


def measured_saved_bytes(model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = ALL) -> int:
    """Bytes of all storages kept between forward and backward, but those of the parameters and the inputs."""
    owner = layer if model.layout(layer).parameters else 0  # a tied head has none of its own
    flat = initial_weights(model, owner, seed=0, dtype=dtype)
    parameters = [view.requires_grad_() for view in views(model.layout(owner), flat)]
    inputs = inputs_of(model, layer, rows, dtype, share)
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout = Dropout(model.dropout, 0, 0, layer, (0,))
        outputs = layers_of(model)[layer].run(parameters, inputs, share, dropout)
    assert all(output is None or output.requires_grad for output in outputs)
    for given in (flat, *inputs):
        if given is not None:
            storages.pop(given.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture
def saved_bytes() -> Callable[..., int]:
    return measured_saved_bytes
