"""Measurement of the memory that a layer keeps for its backward pass, by storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardlab.language import Kind
from shardlab.models import Model
from shardlab.models.mixture import Routing
from shardlab.models.tensors import (
    Context,
    Dropout,
    PreparedLayer,
    Share,
    initial_weights,
    parameter_views,
    prepare_layer,
)
from shardlab.models.tensors.backward import autograd
from shardlab.models.tensors.backward.autograd import ParameterView, SavedTensors
from shardlab.models.tensors.share import WHOLE_LAYER


def piece_of(model: Model, layer: int, number: int) -> Share:
    """One slice of a layer, if it is sliced."""
    run = model.run(layer)
    return Share({index: (piece, run.pieces[index]) for index, piece in run.numbers(number).items()})


def inputs_of(
    model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = WHOLE_LAYER
) -> tuple[Tensor, ...]:
    """Random inputs of a layer's share: its activation, and what is carried beside it, if anything is."""
    shape = list(model.activation_shape(layer, rows))
    reads = model.run(layer).steps[0].primitive.reads.get("x", "").split()
    for index, (_, of) in share.pieces.items():
        if index in reads:
            shape[0 if index == "expert" else -1] //= of
    if share.tokens is not None:
        shape[1] = len(share.tokens)
    if layer == 0:
        return (torch.randint(model.vocab_size, shape),)
    x = torch.randn(shape, dtype=dtype).requires_grad_()
    others = model.run(layer).inputs[1:]
    if not others:
        return (x,)
    tokens = model.seq_len if share.tokens is None else len(share.tokens)
    inputs = [x]
    for kind in model.run(layer).carried_inputs:
        carried = torch.rand(rows, tokens, model.carried_features[kind], dtype=dtype)
        if kind is Kind.ROUTING:  # different experts for each token
            router = next(s.primitive.router for s in model.run(layer).steps if isinstance(s.primitive, Routing))
            choices = torch.rand(*carried.shape[:2], router.experts).argsort(-1)[..., : router.top_k]
            carried[..., -router.top_k :] = choices
        inputs.append(carried.requires_grad_())
    return tuple(inputs)


class Watched(SavedTensors):
    """Tensors that autograd keeps of a primitive, also as a list."""

    tensors: ClassVar[list[Tensor]] = []

    def pack(self, tensor: Tensor) -> Tensor | ParameterView:
        packed = super().pack(tensor)
        if isinstance(packed, Tensor):
            self.tensors.append(packed)
        return packed


def forward(
    model: Model, layer: int, inputs: Sequence[Tensor], weights: Sequence[Tensor], share: Share = WHOLE_LAYER
) -> tuple[list[Tensor], Context, list[Tensor]]:
    """Return the outputs of a layer, its pass, and the tensors kept for the backward pass."""
    dropout = Dropout(model.dropout, 0, 0, layer, (0,))
    with patch.object(autograd, "SavedTensors", Watched):
        outputs, ctx = passes_of(model, layer).forward([x.detach() for x in inputs], weights, share, dropout)
    saved_tensors = [*Watched.tensors, *(tensor for tensor in ctx.tensors if isinstance(tensor, Tensor))]
    Watched.tensors.clear()
    return outputs, ctx, saved_tensors


def measured_saved_bytes(model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = WHOLE_LAYER) -> int:
    """Bytes of all storages kept between forward and backward, but those of the parameters and the inputs."""
    owner = 0 if model.borrowed(layer) else layer  # a tied head has none of its own
    flat = initial_weights(model, owner, seed=0, dtype=dtype)
    inputs = inputs_of(model, layer, rows, dtype, share)
    outputs, _, saved_tensors = forward(model, layer, inputs, parameter_views(model.layout(owner), flat), share)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved_tensors}
    for source, keeps in zip(inputs, model.run(layer).keeps_inputs, strict=True):
        assert keeps or source.untyped_storage().data_ptr() not in storages, (
            "an input is kept that the executor lets go"
        )
    if (run := model.run(layer)).saves_residual:
        residual = outputs[run.outputs.index("s")]
        assert residual.untyped_storage().data_ptr() in storages, "a residual that its layer does not keep takes room"
    for source in (flat, *inputs):
        storages.pop(source.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def passes_of(model: Model, layer: int) -> PreparedLayer:
    """Both passes of a layer."""
    attended = layer > 0 and model.run(layer - 1).attend is not None
    return prepare_layer(model.run(layer), "cpu", attended=attended)


@pytest.fixture
def saved_bytes() -> Callable[..., int]:
    return measured_saved_bytes
