"""Models whose layers are whole blocks of the body."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

from shardlab.errors import UserError
from shardlab.models.kernels import Kernel
from shardlab.models.layout import LayerLayout
from shardlab.models.model import Model
from shardlab.models.parts import Head, Part
from shardlab.program.sizes import Sizes


@dataclass(frozen=True, kw_only=True)
class Blocks(Model):
    """A model with one block of the body in each layer.

    The embedding belongs to layer 0, the final norm and the head to layer `layers - 1`.
    """

    @property
    @abstractmethod
    def embedding(self) -> Part:
        """What comes before the first layer's body."""

    @property
    @abstractmethod
    def body(self) -> tuple[Part, ...]:
        """What every layer computes."""

    @property
    @abstractmethod
    def head(self) -> Part:
        """What comes after the last layer's body."""

    @property
    def common(self) -> dict[str, Any]:
        """The fields that all parts share."""
        return {"block": self.block, "width": self.width, "bias": self.bias, "drops": self.dropout > 0}

    def parts(self, layer: int) -> tuple[Part, ...]:
        """What layer `layer` computes, in order."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        first = (self.embedding,) if layer == 0 else ()
        last = (self.head,) if layer == self.layers - 1 else ()
        return (*first, *self.body, *last)

    def place(self, layer: int) -> str:
        return f"block {layer}"

    def borrowed(self, layer: int) -> tuple[str, ...]:
        tied = isinstance(self.head, Head) and self.head.tied
        return ("wte.weight",) if tied and 0 < layer == self.layers - 1 else ()

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """As `Model.sizes`.

        Raises:
            UserError: when the last block computes with a weight of the first one, as no program of whole blocks can.
        """
        if self.borrowed(self.layers - 1):
            raise UserError(
                f"tied embeddings are one parameter of two layers, but whole blocks share none: of {self.layers}, the "
                "first holds the embedding and the last the head; run it by a plan, which cuts such a model into "
                "half-blocks, set layers to 1, or leave the embeddings untied"
            )
        return super().sizes(rows, element_bytes)

    def layout(self, layer: int) -> LayerLayout:
        return LayerLayout(parameter for part in self.parts(layer) for parameter in part.parameters())

    def activation_shape(self, index: int) -> tuple[int, ...]:
        assert 0 <= index <= self.layers, f"activation {index} of {self.layers} layers"
        if index == 0:
            return (self.block,)
        return (self.block, self.vocabulary if index == self.layers else self.width)

    def saved_elements(self, layer: int) -> int:
        return self.microbatch_saved(layer, 1)

    def microbatch_saved(self, layer: int, rows: int) -> int:
        parts = self.parts(layer)
        between = (len(parts) - 1) * self.block * self.width  # the residual stream, where one part meets the next
        return rows * between + sum(part.microbatch_saved(rows) for part in parts)

    def saved_for_weight(self, layer: int) -> int:
        *others, last = self.parts(layer)
        between = len(others) * self.block * self.width
        given = (
            self.block * self.width if not last.drops and layer < self.layers - 1 else 0
        )  # the output's own gradient
        return between + sum(part.saved_for_weight() for part in (*others, last)) - given

    def forward_flops(self, layer: int) -> int:
        return sum(part.flops() for part in self.parts(layer))

    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return tuple(kernel for part in self.parts(layer) for kernel in part.kernels(sequences, tokens, slices))
