"""Which arithmetic each layer of a model has."""

from __future__ import annotations

from shardlab.models.blocks import Blocks
from shardlab.models.columns import Matrix
from shardlab.models.expert_layers import Dense, ExpertLayers
from shardlab.models.halves import Body, Halves, Output, Projection
from shardlab.models.model import Model
from shardlab.models.tensors.expert_layers import DenseLayer, ExpertsLayer
from shardlab.models.tensors.layers import (
    BlockLayer,
    BodyLayer,
    ColumnLayer,
    Layer,
    NormLayer,
    OutputLayer,
    ProjectionLayer,
)


def layers_of(model: Model) -> list[Layer]:
    """The model's layers, in order."""
    return [_layer(model, layer) for layer in range(model.layers)]


def _layer(model: Model, layer: int) -> Layer:
    names = (*(p.name for p in model.layout(layer).parameters), *model.borrowed(layer))
    if isinstance(model, Blocks):
        return BlockLayer(names, model.parts(layer))
    if isinstance(model, ExpertLayers):
        half = model.half(layer)
        return DenseLayer(names, half) if isinstance(half, Dense) else ExpertsLayer(names, half)
    assert isinstance(model, Halves), f"no arithmetic for {type(model).__name__}"
    half = model.half(layer)
    if isinstance(half, Projection):
        return ProjectionLayer(names, half.part)
    if isinstance(half, Output):
        return OutputLayer(names, half.part)
    if isinstance(half, Matrix):
        return ColumnLayer(names, half)
    if isinstance(half, Body):
        return BodyLayer(names, half)
    return NormLayer(names, half, last=layer == model.layers - 2)
