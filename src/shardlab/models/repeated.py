"""Models whose blocks are all alike, told by three of them: the first, one in the middle, and the last."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TypeVar

from shardlab.models.blocks import Blocks
from shardlab.models.model import Model
from shardlab.program.sizes import Sizes
from shardlab.rules.node import Layer

T = TypeVar("T")

SAMPLED = 3
"""Blocks of a sample."""


def sampled(model: Blocks) -> Blocks:
    """Take three of a model's blocks; all, if it has no more or does not make them all alike, as `Blocks` does."""
    kind = type(model)
    alike = kind.steps is Blocks.steps and kind.runs is Blocks.runs
    return replace(model, layers=min(SAMPLED, model.layers)) if alike else model


@dataclass(frozen=True)
class Repeated:
    """The layers of a model, each like one of its sample's.

    Attributes:
        sample: three blocks, cut into layers as the model is; or all of its blocks.
        more: how many blocks the model has beside them.
    """

    sample: Model
    more: int

    @cached_property
    def each(self) -> int:
        """Layers of a block in the middle."""
        return sum(run.steps[-1].block == 1 for run in self.sample.runs)

    @cached_property
    def alike(self) -> tuple[int, ...]:
        """For each layer the sample's layer that it is like; the loss's place follows the last one's."""
        sampled, each = self.sample.layers, self.each
        first = (sampled - each) // 2
        again = [first + layer % each for layer in range(self.more * each)]
        return (*range(first + each), *again, *range(first + each, sampled + 1))

    def place(self, layer: int) -> str:
        """Where a layer stands in the model, as `Model.place` tells it."""
        like = self.alike[layer]
        if like == layer:
            return self.sample.place(layer)
        further = (layer - like) // self.each
        return re.sub(r"\bblock (\d+)", lambda found: f"block {int(found[1]) + further}", self.sample.place(like))

    def sizes(self, sizes: Sizes) -> Sizes:
        """Sizes of the model, from those of its sample."""
        if not self.more:
            return sizes
        layers = self.alike[:-1]
        starts = sizes.blocks[:1] and [sizes.blocks[0] + block * self.each for block in range(self.more)]
        return replace(
            sizes,
            weights=_taken(sizes.weights, layers),
            opt_states=_taken(sizes.opt_states, layers),
            matrices=_taken(sizes.matrices, layers),
            activations=_taken(sizes.activations, self.alike),
            saved=_taken(sizes.saved, layers),
            saved_for_weight=_taken(sizes.saved_for_weight, layers),
            keeps_input=_taken(sizes.keeps_input, layers),
            saves_residual=_taken(sizes.saves_residual, layers),
            signatures=_signatures(sizes.signatures, layers),
            weight_blocks=tuple(
                [
                    tuple([block + (layer - like) // self.each for block in sizes.weight_blocks[like]])
                    for layer, like in enumerate(layers)
                ]
            ),
            blocks=(*starts, *[start + self.more * self.each for start in sizes.blocks]),
        )


def _taken(values: Sequence[T], layers: Sequence[int]) -> tuple[T, ...]:
    return tuple([values[layer] for layer in layers]) if values else ()


@lru_cache(maxsize=64)
def _signatures(sampled: tuple[Layer, ...], alike: tuple[int, ...]) -> tuple[Layer, ...]:
    """Signatures of layers that are like these; the same objects for all models of one shape."""
    return tuple([_moved(sampled[like], layer - like) for layer, like in enumerate(alike)])


def _moved(layer: Layer, by: int) -> Layer:
    """A layer that stands so many places further; the weight of a tied one stays the first layer's."""
    if not by:
        return layer
    inputs = tuple([port._replace(layer=port.layer + by) for port in layer.inputs])
    outputs = tuple([port._replace(layer=port.layer + by) for port in layer.outputs])
    return replace(layer, inputs=inputs, outputs=outputs, weight=layer.weight + (0 if layer.use else by))
