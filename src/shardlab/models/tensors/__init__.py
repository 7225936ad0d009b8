"""The models' arithmetic on torch.

Read `compute` first: it defines every primitive. `layers` runs them as a function of tensors, and `backward` has the
passes that the executor runs. The other modules are `attention` and `mixture` (arithmetic of larger primitives),
`share` (the part of a layer that a rank computes), `dropout` (masks), `weights` (initialization and flat buffers) and
`generate` (text).
"""

from shardlab.models.tensors.backward import (
    Accumulate,
    AddGradients,
    CompiledPasses,
    Context,
    PreparedLayer,
    prepare_layer,
)
from shardlab.models.tensors.compute import (
    combine_loss,
    cross_entropy,
    cross_entropy_backward,
    log_probabilities,
    loss_gradient,
    loss_of,
    loss_stats,
)
from shardlab.models.tensors.dropout import Dropout, make_generator
from shardlab.models.tensors.generate import TextGenerator, TokenSampling
from shardlab.models.tensors.layers import compile_layers, make_layers
from shardlab.models.tensors.share import Share
from shardlab.models.tensors.weights import (
    Initial,
    add_borrowed,
    initial_weights,
    named_views,
    pad_runs,
    parameter_views,
    to_blocks,
    to_layers,
    whole_parameters,
)

__all__ = [
    "Accumulate",
    "AddGradients",
    "CompiledPasses",
    "Context",
    "Dropout",
    "Initial",
    "PreparedLayer",
    "Share",
    "TextGenerator",
    "TokenSampling",
    "add_borrowed",
    "combine_loss",
    "compile_layers",
    "cross_entropy",
    "cross_entropy_backward",
    "initial_weights",
    "log_probabilities",
    "loss_gradient",
    "loss_of",
    "loss_stats",
    "make_generator",
    "make_layers",
    "named_views",
    "pad_runs",
    "parameter_views",
    "prepare_layer",
    "to_blocks",
    "to_layers",
    "whole_parameters",
]
