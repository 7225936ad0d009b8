"""Both passes of a layer that is compiled: the compiler makes the second of the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardlab.models.tensors.both_passes.by_autograd import Graph, take_gradients
from shardlab.models.tensors.both_passes.primitive import Take, Weights
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.layers import TensorLayer
from shardlab.models.tensors.share import ALL, Share


@dataclass(frozen=True)
class CompiledPasses:
    """Both passes of one layer, as `PreparedLayer`; the compiler chooses what is kept.

    Attributes:
        layer: compiled at its first call.
    """

    layer: TensorLayer

    def forward(
        self,
        inputs: Sequence[Tensor],
        weights: Weights,
        share: Share = ALL,
        dropout: Dropout | None = None,
        *,
        keeps: bool = True,
    ) -> tuple[list[Tensor], Graph | None]:
        """The layer's outputs, and what its backward pass wants (see `PreparedLayer.forward`)."""

        def function(parameters: Weights, given: Sequence[Tensor]) -> Sequence[Tensor]:
            return self.layer.run(parameters, given, share, dropout)

        if not keeps:
            with torch.no_grad():
                return [*function(weights, inputs)], None
        graph = Graph(function, weights, inputs)
        return graph.take_outputs(), graph

    def backward(self, kept: Graph, given: Sequence[Tensor], weights: Weights, take: Take) -> list[Tensor | None]:
        """The inputs' gradients, of those of the outputs; none for tokens."""
        found = kept.backward(weights, given)
        inputs = len(found) - len(weights)
        take_gradients(take, range(len(weights)), found[inputs:])
        return found[:inputs]
