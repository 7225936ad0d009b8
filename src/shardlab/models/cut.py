"""Models whose layers are finer than blocks, so that a program can communicate between them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Protocol

from shardlab.models.blocks import Blocks
from shardlab.models.layout import Parameter
from shardlab.models.model import Model
from shardlab.models.part import Part
from shardlab.models.parts import Embedding, Head


class Fragment(Protocol):
    """What one layer computes."""

    def sources(self) -> list[tuple[int, Parameter]]:
        """Its parameters, each with the block that holds it in the whole model."""
        ...

    @property
    def place(self) -> str:
        """Where it stands in the whole model."""
        ...


def place_of(part: Part, block: int, what: str = "") -> str:
    """`block 31, feed-forward`; or `embedding`, `head`, which belong to no block."""
    return part.title if isinstance(part, Embedding | Head) else f"block {block}, {part.title}{what}"


@dataclass(frozen=True, init=False)
class CutModel(Model):
    """The blocks of another model, cut into finer layers, some of them sliced over ranks.

    Attributes:
        whole: the model that is cut; `layers` counts the finer layers, all other fields are its own.
        slices: of every layer that is sliced.
    """

    whole: Blocks
    slices: int

    def __init__(self, whole: Blocks, slices: int, layers: int) -> None:
        common: dict[str, Any] = {field.name: getattr(whole, field.name) for field in fields(Model)}
        common["layers"] = layers
        super().__init__(**common)
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "slices", slices)
        self.at_least_one("slices")

    @abstractmethod
    def half(self, layer: int) -> Fragment:
        """What layer `layer` computes."""

    def place(self, layer: int) -> str:
        return self.half(layer).place

    @property
    def parameter_count(self) -> int:
        return self.whole.parameter_count
