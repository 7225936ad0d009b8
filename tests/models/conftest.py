"""What the models' tests share: a measurement of what autograd keeps for a layer, by storages."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardlab.models import Model
from shardlab.models.tensors import Dropout, initial_weights, layers_of, views


def measured_saved_bytes(model: Model, layer: int, rows: int, dtype: torch.dtype) -> int:
    """Bytes of all storages kept between forward and backward, but those of the parameters and the input."""
    flat = initial_weights(model, layer, seed=0, dtype=dtype)
    parameters = [view.requires_grad_() for view in views(model.layout(layer), flat)]
    shape = (rows, *model.activation_shape(layer))
    x = torch.randint(model.vocabulary, shape) if layer == 0 else torch.randn(shape, dtype=dtype).requires_grad_()
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = layers_of(model)[layer](parameters, x, Dropout(model.dropout, 0, 0, layer, (0,)))
    assert output.requires_grad
    for given in (flat, x):
        storages.pop(given.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture
def saved_bytes() -> Callable[[Model, int, int, torch.dtype], int]:
    return measured_saved_bytes
