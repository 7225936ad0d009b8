"""The models' arithmetic on torch: layers, dropout, first weights, loss and sampling."""

from shardlab.models.tensors.backward import (
    AddGradients,
    CompiledPasses,
    PreparedLayer,
    Take,
    Workspace,
    prepared_layer,
)
from shardlab.models.tensors.compute import combined_loss, loss_gradient, loss_of, loss_stats
from shardlab.models.tensors.dropout import Dropout, generator_of
from shardlab.models.tensors.generate import Choice, Writer
from shardlab.models.tensors.layers import TensorLayer, compiled_layers_of, layers_of
from shardlab.models.tensors.share import Share
from shardlab.models.tensors.weights import (
    Initial,
    initial_weights,
    lengthened,
    named_views,
    to_blocks,
    to_layers,
    views,
    whole_parameters,
    with_borrowed,
)

__all__ = [
    "AddGradients",
    "Choice",
    "CompiledPasses",
    "Dropout",
    "Initial",
    "PreparedLayer",
    "Share",
    "Take",
    "TensorLayer",
    "Workspace",
    "Writer",
    "combined_loss",
    "compiled_layers_of",
    "generator_of",
    "initial_weights",
    "layers_of",
    "lengthened",
    "loss_gradient",
    "loss_of",
    "loss_stats",
    "named_views",
    "prepared_layer",
    "to_blocks",
    "to_layers",
    "views",
    "whole_parameters",
    "with_borrowed",
]
