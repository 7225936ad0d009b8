"""What the models' tests share: a measurement of what autograd keeps for a layer, by storages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor

from shardlab.models import Model
from shardlab.models.mixture import Routing
from shardlab.models.tensors import Dropout, Products, Share, initial_weights, layers_of, views
from shardlab.models.tensors.products import AddGradients, Again
from shardlab.models.tensors.share import ALL
from shardlab.program import Kind


def piece_of(model: Model, layer: int, number: int) -> Share:
    """One slice of a layer, if it is sliced."""
    run = model.run(layer)
    return Share({index: (piece, run.pieces[index]) for index, piece in run.numbers(number).items()})


def inputs_of(model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = ALL) -> tuple[Tensor, ...]:
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
    given = [x]
    for kind in model.run(layer).carried_inputs:
        carried = torch.rand(rows, tokens, model.carried_features[kind], dtype=dtype)
        if kind is Kind.ROUTING:  # different experts for each token
            router = next(s.primitive.router for s in model.run(layer).steps if isinstance(s.primitive, Routing))
            chosen = torch.rand(*carried.shape[:2], router.experts).argsort(-1)[..., : router.top_k]
            carried[..., -router.top_k :] = chosen
        given.append(carried.requires_grad_())
    return tuple(given)


class Watched(Products):
    """Products, and the tensors that they keep."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def watch(
        self, made: Tensor, read: Tensor, again: Again | None, parameters: Sequence[Tensor], add: AddGradients
    ) -> None:
        super().watch(made, read, again, parameters, add)
        if again is None:
            self.kept.append(read)
        else:
            assert isinstance(again, partial)
            self.kept += again.args[1].tensors.values()


def measured_saved_bytes(model: Model, layer: int, rows: int, dtype: torch.dtype, share: Share = ALL) -> int:
    """Bytes of all storages kept between forward and backward, but those of the parameters and the inputs."""
    owner = 0 if model.borrowed(layer) else layer  # a tied head has none of its own
    flat = initial_weights(model, owner, seed=0, dtype=dtype)
    parameters = [view.requires_grad_() for view in views(model.layout(owner), flat)]
    inputs = inputs_of(model, layer, rows, dtype, share)
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    products = Watched()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dropout = Dropout(model.dropout, 0, 0, layer, (0,))
        outputs = layers_of(model)[layer].run(parameters, inputs, share, dropout, products=products)
    for tensor in products.kept:
        pack(tensor)
    assert all(output.requires_grad for output in outputs)
    for given, keeps in zip(inputs, model.run(layer).keeps_inputs, strict=True):
        kept = given.untyped_storage().data_ptr() in storages
        assert keeps or not kept, "an input is kept that the executor lets go"
    if (run := model.run(layer)).saves_residual:
        residual = outputs[run.outputs.index("s")]
        assert residual.untyped_storage().data_ptr() in storages, "a residual that autograd does not keep takes room"
    for given in (flat, *inputs):
        storages.pop(given.untyped_storage().data_ptr(), None)
    return sum(storage.nbytes() for storage in storages.values())


@pytest.fixture
def saved_bytes() -> Callable[..., int]:
    return measured_saved_bytes
