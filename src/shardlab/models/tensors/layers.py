"""Layers as functions of tensors, for autograd and torch.compile.

`TensorLayer` runs the definitions of a layer's primitives in order. It is the reference for the written-out passes in
`backward`, and it generates text. `CompiledLayer` compiles the same function by torch.compile.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardlab.models.layer import Run
from shardlab.models.model import Model
from shardlab.models.primitives import Primitive
from shardlab.models.tensors.attention import KeyValueCache
from shardlab.models.tensors.compute import Operands, compute
from shardlab.models.tensors.dropout import Dropout, FactorInputs, make_factor
from shardlab.models.tensors.share import WHOLE_LAYER, Share


class _PreparedStep(NamedTuple):
    """Step of a layer with its function looked up.

    Attributes:
        primitive: the primitive.
        function: function that computes the primitive.
        makes: names of the results.
        dropped: names of the tensors that no later step reads, to be freed.
    """

    primitive: Primitive
    function: Callable[..., tuple[Tensor, ...]]
    makes: tuple[str, ...]
    dropped: set[str]


@dataclass(frozen=True)
class TensorLayer:
    """Layer of a model as a function of its parameters and its inputs. It stores no tensors.

    Attributes:
        layer: the layer with its primitives.
    """

    layer: Run

    def run(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        share: Share = WHOLE_LAYER,
        dropout: Dropout | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the layer's outputs.

        Tensors beside the activation that belong to one kind of value, such as a router's gates and choices, are
        concatenated along the features into one further output.

        Args:
            parameters: the parameters in the layout's order; those of one slice if the layer is sliced.
            inputs: the input activation, (rows, *shape), then any other inputs, such as a router's outputs.
            share: the slice of the layer, or the tokens, to compute.
            dropout: source of this step's dropout masks. If the layer spans several blocks, each has its own masks.
            cache: keys and values of earlier tokens; the share's tokens follow them.

        Returns:
            The outputs, (rows, ...), the activation first. They share no memory.
        """
        factors = self.factors(parameters, inputs, share, dropout)
        return self.compute(parameters, inputs, factors, share, cache)

    def factors(
        self, parameters: Sequence[Tensor], inputs: Sequence[Tensor], share: Share, dropout: Dropout | None
    ) -> Iterator[Tensor | None]:
        """Yield, for each primitive, its factor that is not a parameter, such as a dropout mask (None: it has none)."""
        rows, length = inputs[-1].shape[:2]  # the first input may be experts' buffers
        factor_inputs = FactorInputs(rows, length, share, None, parameters[0] if parameters else inputs[0])
        for step, factor_function in zip(self.layer.steps, self._factors, strict=True):
            if factor_function is None:
                yield None
                continue
            masks = None if dropout is None else dropout.of_block(step.block)
            yield factor_function(step.primitive, replace(factor_inputs, dropout=masks) if masks else factor_inputs)

    def compute(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        factors: Iterable[Tensor | None],
        share: Share,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the layer's outputs from the factors of its steps, so that all inputs are tensors."""
        by_name = dict(zip(self.layer.names, parameters, strict=True))
        tensors = self._unpacked(inputs)
        operands = Operands(by_name, tensors, share, None, cache)
        for step, operands.factor in zip(self._steps, factors, strict=True):
            results = step.function(step.primitive, operands)
            tensors |= zip(step.makes, results, strict=True)
            for name in step.dropped:
                del tensors[name]
        return self._packed(tensors)

    def __call__(
        self, parameters: Sequence[Tensor], x: Tensor, dropout: Dropout | None = None, share: Share = WHOLE_LAYER
    ) -> Tensor:
        """Compute activation l + 1 from activation l, (rows, *shape), in a layer with one input and one output."""
        (y,) = self.run(parameters, (x,), share, dropout)
        return y

    @cached_property
    def _steps(self) -> list[_PreparedStep]:
        """The steps with their functions looked up."""
        return [
            _PreparedStep(primitive, compute.dispatch(type(primitive)), tuple(primitive.makes), dropped)
            for primitive, dropped in zip(self.layer.primitives, self._dropped, strict=True)
        ]

    @cached_property
    def _factors(self) -> list[Callable[..., Tensor | None] | None]:
        """Functions that compute the steps' factors; None for a step without one."""
        functions = [make_factor.dispatch(type(primitive)) for primitive in self.layer.primitives]
        return [None if function is make_factor.dispatch(object) else function for function in functions]

    @property
    def _dropped(self) -> list[set[str]]:
        """For each step, names of the tensors that are read by this step for the last time."""
        needed, dropped = set(self.layer.outputs), list[set[str]]()
        for primitive in reversed(self.layer.primitives):
            reads, makes = set(primitive.reads), set(primitive.makes)
            dropped.append(reads - needed - makes)
            needed = needed - makes | reads
        return dropped[::-1]

    def _unpacked(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Split the layer's inputs into tensors by name."""
        tensors = {self.layer.inputs[0]: inputs[0]}
        for names, value in zip(self.layer.carried_inputs.values(), inputs[1:], strict=True):
            tensors |= dict(zip(names, value.chunk(len(names), -1), strict=True))
        return tensors

    def _packed(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """Return the layer's outputs. Tensors that share one are concatenated, in the dtype of the activation."""
        first = tensors[self.layer.outputs[0]]
        if self.layer.attend is not None:  # queries, and keys and values, are views of one tensor
            return first.clone(), *(tensors[name].clone() for name in self.layer.outputs[1:])
        carried = [[tensors[name] for name in names] for names in self.layer.carried_outputs.values()]
        return first, *(parts[0] if len(parts) == 1 else _side_by_side(parts, first.dtype) for parts in carried)


def make_layers(model: Model) -> list[TensorLayer]:
    """Return the model's layers, in order."""
    return [TensorLayer(run) for run in model.runs]


BACKEND = "inductor"
"""Compiler behind torch.compile."""

Compiled = Callable[..., tuple[Tensor, ...]]

FUNCTIONS: dict[tuple[Any, ...], Compiled] = {}
"""Compiled functions by key. Layers with the same arithmetic share a function. torch.compile adds a graph to this
function for each shape, and for no_grad."""


class CompiledLayer(TensorLayer):
    """Layer whose arithmetic is compiled at its first call. Dropout masks and rotary angles are inputs of the graph."""

    def run(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        share: Share = WHOLE_LAYER,
        dropout: Dropout | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[Tensor, ...]:
        """Compute the layer's outputs (see `TensorLayer.run`). The compiler chooses the tensors to save."""
        assert cache is None, "compiled layers keep no cache of keys and values"
        factors = list(self.factors(parameters, inputs, share, dropout))
        tensors = [
            torch.view_as_real(factor) if factor.is_complex() else factor for factor in factors if factor is not None
        ]
        function = self._function(share, tuple(factor is not None for factor in factors))
        if self.layer.affine:  # a tensor, so that a new scale needs no new graph
            device = inputs[0].device
            tensors.append(torch.full((), float(share.gradient_scale), dtype=torch.float64, device=device))
        return function(*parameters, *inputs, *tensors)

    def _function(self, share: Share, factors: tuple[bool, ...]) -> Compiled:
        """Return the compiled function of (parameters, inputs, factors); `factors`: which steps have a factor."""
        layer, attend = self.layer, self.layer.attend
        ends = layer.inputs, layer.outputs, attend and attend.primitive
        key = BACKEND, layer.names, layer.primitives, ends, share.key, factors
        if key not in FUNCTIONS:
            FUNCTIONS[key] = _compiled(TensorLayer(layer), share, factors)
        return FUNCTIONS[key]


def compile_layers(model: Model) -> list[TensorLayer]:
    """Return the model's layers, in order, each compiled at its first call."""
    return [CompiledLayer(run) for run in model.runs]


def _side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([tensor.to(dtype) for tensor in tensors], -1)


def _compiled(layer: TensorLayer, share: Share, factors: tuple[bool, ...]) -> Compiled:
    affine = layer.layer.affine
    parameters, extras = len(layer.layer.names), sum(factors) + affine

    # Dynamo need not analyse this Python code: the layer is a function of tensors, so tracing tensors is enough.
    @torch.compiler.allow_in_graph
    def compute(*tensors: Tensor) -> tuple[Tensor, ...]:
        first = len(tensors) - extras
        extra_tensors = iter(tensors[first:])
        step_factors = (next(extra_tensors) if has else None for has in factors)
        scaled = replace(share, gradient_scale=tensors[-1]) if affine else share
        return layer.compute(tensors[:parameters], tensors[parameters:first], step_factors, scaled)

    def traced(*tensors: Tensor) -> tuple[Tensor, ...]:
        return compute(*tensors)

    # torch.compile limits the number of graphs of each code object, so every kind of layer gets its own code object.
    code = traced.__code__.replace(co_name=f"layer_{layer.layer.name.replace('-', '_')}")
    function = FunctionType(code, traced.__globals__, code.co_name, None, traced.__closure__)
    # Products in float32 stay in float32 on a GPU. Torch recommends TF32, whose fraction has 10 bits.
    warnings.filterwarnings("ignore", "TensorFloat32 tensor cores", UserWarning)
    return torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)
