"""A layer as a function of tensors: its primitives, one after the other."""

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
from shardlab.models.tensors.attention import KeysValues
from shardlab.models.tensors.compute import Given, compute
from shardlab.models.tensors.dropout import Dropout, Surroundings, factor
from shardlab.models.tensors.share import ALL, Share


class _Prepared(NamedTuple):
    """A step of a layer, with all that is looked up once.

    Attributes:
        primitive: what is computed.
        function: what computes it.
        makes: names of what it makes.
        dropped: names of the tensors that it is the last to read.
    """

    primitive: Primitive
    function: Callable[..., tuple[Tensor, ...]]
    makes: tuple[str, ...]
    dropped: set[str]


@dataclass(frozen=True)
class TensorLayer:
    """One layer of a model, a function of its parameters and its inputs; it holds no tensor itself.

    Attributes:
        names: of the parameters, in the layout's order; then of those that it borrows.
        layer: its primitives.
    """

    names: tuple[str, ...]
    layer: Run

    def run(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        share: Share = ALL,
        dropout: Dropout | None = None,
        cache: KeysValues | None = None,
    ) -> tuple[Tensor, ...]:
        """The layer's outputs, rows first like its inputs; the activation comes first, each is memory of its own.

        What a router says of tokens is carried as one tensor, its parts side by side.

        Args:
            parameters: in the layout's order; of one slice where the layer is sliced.
            inputs: activation l, (rows, *shape), and what is carried.
            share: which slice or which tokens are computed.
            dropout: the step's and the microbatches'; the layer's masks are those of the blocks that it is made of.
            cache: keys and values of earlier tokens; the share's tokens are those that follow.
        """
        factors = self.factors(parameters, inputs, share, dropout)
        return self.compute(parameters, inputs, factors, share, cache)

    def factors(
        self, parameters: Sequence[Tensor], inputs: Sequence[Tensor], share: Share, dropout: Dropout | None
    ) -> Iterator[Tensor | None]:
        """What each step multiplies by beside its parameters, made one after the other."""
        rows, length = inputs[-1].shape[:2]  # the first may be experts' buffers
        around = Surroundings(rows, length, share, None, parameters[0] if parameters else inputs[0])
        for step, made_by in zip(self.layer.steps, self._factors, strict=True):
            if made_by is None:
                yield None
                continue
            masks = None if dropout is None else dropout.of_block(step.block)
            yield made_by(step.primitive, around if masks is None else replace(around, dropout=masks))

    def compute(
        self,
        parameters: Sequence[Tensor],
        inputs: Sequence[Tensor],
        factors: Iterable[Tensor | None],
        share: Share,
        cache: KeysValues | None = None,
    ) -> tuple[Tensor, ...]:
        """`run`, given what the steps multiply by: a function of tensors alone."""
        by_name = dict(zip(self.names, parameters, strict=True))
        tensors = self._unpacked(inputs)
        given = Given(by_name, tensors, share, None, cache)
        for step, given.factor in zip(self._steps, factors, strict=True):
            made = step.function(step.primitive, given)
            tensors |= zip(step.makes, made, strict=True)
            for name in step.dropped:
                del tensors[name]
        return self._packed(tensors)

    def __call__(
        self, parameters: Sequence[Tensor], x: Tensor, dropout: Dropout | None = None, share: Share = ALL
    ) -> Tensor:
        """Activation l, (rows, *shape), to activation l + 1, for a layer with one input and one output."""
        (y,) = self.run(parameters, (x,), share, dropout)
        return y

    @cached_property
    def _steps(self) -> list[_Prepared]:
        """What each step wants, looked up once."""
        primitives = [step.primitive for step in self.layer.steps]
        return [
            _Prepared(primitive, compute.dispatch(type(primitive)), tuple(primitive.makes), dropped)
            for primitive, dropped in zip(primitives, self._dropped, strict=True)
        ]

    @cached_property
    def _factors(self) -> list[Callable[..., Tensor | None] | None]:
        """What makes each step's factor; None for a step that has none."""
        found = [factor.dispatch(type(step.primitive)) for step in self.layer.steps]
        return [None if each is factor.dispatch(object) else each for each in found]

    @property
    def _dropped(self) -> list[set[str]]:
        """Names of the tensors that each step is the last to read."""
        needed, dropped = set(self.layer.outputs), list[set[str]]()
        for step in reversed(self.layer.steps):
            reads, makes = set(step.primitive.reads), set(step.primitive.makes)
            dropped.append(reads - needed - makes)
            needed = needed - makes | reads
        return dropped[::-1]

    def _unpacked(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """The tensors that come in the layer's inputs, by name."""
        tensors = {self.layer.inputs[0]: inputs[0]}
        for names, value in zip(self.layer.carried_inputs.values(), inputs[1:], strict=True):
            tensors |= dict(zip(names, value.chunk(len(names), -1), strict=True))
        return tensors

    def _packed(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The layer's outputs; tensors of one kind go side by side, as floating-point numbers."""
        first = tensors[self.layer.outputs[0]]
        if self.layer.attend is not None:  # queries, and keys and values, are views of one tensor
            return first.clone(), *(tensors[name].clone() for name in self.layer.outputs[1:])
        carried = [[tensors[name] for name in names] for names in self.layer.carried_outputs.values()]
        return first, *(each[0] if len(each) == 1 else _side_by_side(each, first.dtype) for each in carried)


def _side_by_side(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([each.to(dtype) for each in tensors], -1)


def layers_of(model: Model) -> list[TensorLayer]:
    """The model's layers, in order."""
    return [TensorLayer((*(p.name for p in run.layout.parameters), *run.borrows), run) for run in model.runs]


# Layers compiled by torch.compile: one function for all layers that compute alike.


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
