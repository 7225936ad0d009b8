"""Layers compiled by torch.compile: one function for all layers that compute alike."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from shardlab.models.model import Model
from shardlab.models.tensors.cache import KeysValues
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.layers import TensorLayer, layers_of
from shardlab.models.tensors.share import ALL, Share

BACKEND = "inductor"
"""Compiler behind torch.compile."""

Compiled = Callable[..., tuple[Tensor, ...]]

FUNCTIONS: dict[tuple[Any, ...], Compiled] = {}
"""Functions by what they compute; torch.compile adds a graph to each for every shape, and for no_grad."""


class CompiledLayer(TensorLayer):
    """A layer whose arithmetic is compiled at its first call. Masks and angles are made outside, as its inputs."""

    def run(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        share: Share = ALL,
        dropout: Dropout | None = None,
        cache: KeysValues | None = None,
    ) -> tuple[Tensor, ...]:
        """Run it as `TensorLayer.run` does; the compiler chooses what is kept."""
        assert cache is None, "text is written by layers that are not compiled"
        factors = list(self.factors(parameters, inputs, share, dropout))
        given = [torch.view_as_real(each) if each.is_complex() else each for each in factors if each is not None]
        function = self._function(share, tuple(each is not None for each in factors))
        if self.layer.affine:  # a tensor, so that another scale needs no other graph
            device = inputs[0].device
            given.append(torch.full((), float(share.gradient_scale), dtype=torch.float64, device=device))
        return function(*parameters, *inputs, *given)

    def _function(self, share: Share, factors: tuple[bool, ...]) -> Compiled:
        """Find the function of (parameters, inputs, factors) of this kind of layer; `factors`: which steps have one."""
        layer, attend = self.layer, self.layer.attend
        primitives = tuple(step.primitive for step in layer.steps)
        ends = layer.inputs, layer.outputs, attend and attend.primitive
        key = BACKEND, self.names, primitives, ends, share.key, factors
        if key not in FUNCTIONS:
            FUNCTIONS[key] = _compiled(TensorLayer(self.names, layer), share, factors)
        return FUNCTIONS[key]


def compiled_layers_of(model: Model) -> list[TensorLayer]:
    """The model's layers, in order, each compiled at its first call."""
    return [CompiledLayer(layer.names, layer.layer) for layer in layers_of(model)]


def _compiled(layer: TensorLayer, share: Share, factors: tuple[bool, ...]) -> Compiled:
    affine = layer.layer.affine
    held, taken = len(layer.names), sum(factors) + affine

    # Dynamo would read our Python; the layer is a function of tensors, so that tracing it on tensors is enough.
    @torch.compiler.allow_in_graph
    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        first = len(tensors) - taken
        given = iter(tensors[first:])
        its = (next(given) if has else None for has in factors)
        scaled = replace(share, gradient_scale=tensors[-1]) if affine else share
        return layer.compute(tensors[:held], tensors[held:first], its, scaled)

    def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
        return compute(*tensors)

    # Graphs are kept, and their number is limited, for each code object: every kind of layer gets one of its own.
    code = traced.__code__.replace(co_name=f"layer_{layer.layer.name.replace('-', '_')}")
    own = FunctionType(code, traced.__globals__, code.co_name, None, traced.__closure__)
    # Products in float32 stay exact on a GPU. Torch advises TF32, which has 10 bits of a fraction.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    return torch.compile(own, fullgraph=True, dynamic=False, backend=BACKEND)
