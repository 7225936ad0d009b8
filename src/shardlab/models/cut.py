"""Models whose layers are finer than blocks, so that a program can communicate between them."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, Protocol

from shardlab.models.blocks import Blocks
from shardlab.models.layout import Parameter
from shardlab.models.model import Model


class Fragment(Protocol):
    """What one layer computes."""

    def sources(self) -> list[tuple[int, Parameter]]:
        """Its parameters, each with the block that holds it in the whole model."""
        ...


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

    @property
    def parameter_count(self) -> int:
        return self.whole.parameter_count
