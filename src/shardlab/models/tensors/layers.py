"""A layer as a function of tensors: its primitives, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from shardlab.models.model import Model
from shardlab.models.run import Run
from shardlab.models.tensors.compute import Given, compute
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.share import ALL, Share


@dataclass(frozen=True)
class Layer:
    """One layer of a model, a function of its parameters and its inputs; it holds no tensor itself.

    Attributes:
        names: of the parameters, in the layout's order; then of those that it borrows.
        layer: its primitives.
        carried: features of each tensor that the last layer before it that made any made beside its activation.
    """

    names: tuple[str, ...]
    layer: Run
    carried: tuple[int, ...]

    def run(
        self, parameters: Sequence[Tensor], inputs: Sequence[Tensor], share: Share = ALL, dropout: Dropout | None = None
    ) -> tuple[Tensor, ...]:
        """The layer's outputs, rows first like its inputs; the activation comes first, each is memory of its own.

        What is carried from layer to layer beside it is one tensor, its parts side by side.

        Args:
            parameters: in the layout's order; of one slice where the layer is sliced.
            inputs: activation l, (rows, *shape), and what is carried.
            share: which slice or which tokens are computed.
            dropout: the step's and the microbatches'; the layer's masks are those of the blocks that it is made of.
        """
        if dropout is not None and dropout.probability == 0:
            dropout = None
        by_name = dict(zip(self.names, parameters, strict=True))
        tensors = self._unpacked(inputs)
        for step, dropped in zip(self.layer.steps, self._dropped, strict=True):
            masks = None if dropout is None else replace(dropout, layer=step.block)
            made = compute(step.primitive, Given(by_name, tensors, share, masks))
            tensors.update(zip(step.primitive.makes, made, strict=True))
            for name in dropped:
                del tensors[name]
        return self._packed(tensors)

    def __call__(
        self, parameters: Sequence[Tensor], x: Tensor, dropout: Dropout | None = None, share: Share = ALL
    ) -> Tensor:
        """Activation l, (rows, *shape), to activation l + 1, for a layer with one input and one output."""
        (y,) = self.run(parameters, (x,), share, dropout)
        return y

    @cached_property
    def _dropped(self) -> list[set[str]]:
        """After each step, the tensors that it read and that nothing reads any more."""
        needed, dropped = set(self.layer.outputs), list[set[str]]()
        for step in reversed(self.layer.steps):
            reads, makes = set(step.primitive.reads), set(step.primitive.makes)
            dropped.append(reads - needed - makes)
            needed = needed - makes | reads
        return dropped[::-1]

    def _unpacked(self, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        first, *others = self.layer.inputs
        if len(others) <= 1:
            return dict(zip(self.layer.inputs, inputs, strict=True))
        x, carried = inputs
        return {first: x} | dict(zip(others, torch.split(carried, list(self.carried), -1), strict=True))

    def _packed(self, tensors: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        first, *others = (tensors[name] for name in self.layer.outputs)
        if self.layer.attend is not None:  # queries, and keys and values, are views of one tensor
            return first.clone(), *(each.clone() for each in others)
        if len(others) > 1:
            others = [torch.cat([each.to(others[0].dtype) for each in others], -1)]
        return first, *others


def layers_of(model: Model) -> list[Layer]:
    """The model's layers, in order."""
    carried: tuple[int, ...] = ()
    found: list[Layer] = []
    for number, layer in enumerate(model.runs):
        names = (*(p.name for p in layer.layout.parameters), *layer.borrows)
        found.append(Layer(names, layer, carried))
        carried = model.carried_features(number) or carried
    return found
