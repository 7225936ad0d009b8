"""A layer as a function of tensors: its primitives, one after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from shardlab.models.model import Model
from shardlab.models.primitive import Primitive
from shardlab.models.run import Run
from shardlab.models.tensors.cache import KeysValues
from shardlab.models.tensors.compute import Given, compute
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.factors import Surroundings, factor
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
