"""What every model is: a list of layers, each a few parts, from tokens to logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardlab.models.layout import LayerLayout
from shardlab.models.parts import Part
from shardlab.program.errors import UserError
from shardlab.program.sizes import Sizes
from shardlab.program.values import Kind


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A language model, cut into the layers of a program.

    The embedding belongs to layer 0, the final norm and the head to layer `layers - 1`. Activation l enters layer l.

    Attributes:
        layers: layers of the program, each with one block of the body.
        width: features of a token in the residual stream.
        vocabulary: how many different tokens there are (256: bytes).
        block: tokens of a sequence, and the longest context.
        bias: whether linear maps and norms have a bias.
        dropout: probability that an element is dropped in training.
    """

    layers: int = 4
    width: int = 64
    vocabulary: int = 256
    block: int = 64
    bias: bool = True
    dropout: float = 0.0

    def __post_init__(self) -> None:
        self.at_least_one("layers", "width", "vocabulary", "block")
        if not 0 <= self.dropout < 1:
            raise UserError(f"dropout is {self.dropout}; it is a probability, from 0 up to but not including 1")

    def at_least_one(self, *names: str) -> None:
        """Refuse counts that are zero or negative."""
        for name in names:
            if (count := getattr(self, name)) < 1:
                raise UserError(f"{name} is {count}; a model needs at least 1")

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
    def common(self) -> tuple[int, int, bool, bool]:
        """The fields that all parts share."""
        return self.block, self.width, self.bias, self.dropout > 0

    def parts(self, layer: int) -> tuple[Part, ...]:
        """What layer `layer` computes, in order."""
        assert 0 <= layer < self.layers, f"layer {layer} of {self.layers}"
        first = (self.embedding,) if layer == 0 else ()
        last = (self.head,) if layer == self.layers - 1 else ()
        return (*first, *self.body, *last)

    def layout(self, layer: int) -> LayerLayout:
        """Where the layer's parameters lie in its flat buffer."""
        return LayerLayout(parameter for part in self.parts(layer) for parameter in part.parameters())

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(self.layout(layer).parameter_count for layer in range(self.layers))

    def activation_shape(self, index: int) -> tuple[int, ...]:
        """Shape of activation `index` for one sequence: int64 tokens at first, logits at last."""
        assert 0 <= index <= self.layers, f"activation {index} of {self.layers} layers"
        if index == 0:
            return (self.block,)
        return (self.block, self.vocabulary if index == self.layers else self.width)

    def saved_elements(self, layer: int) -> int:
        """Elements that autograd keeps between the layer's forward and backward, for one sequence in training.

        Beyond the layer's input activation and its parameters; exactly what is measured on a CPU. All are of the
        compute dtype, but for attention's log-sum-exp (without dropout): it is float32 in half precision, so that
        `heads * block` elements count twice there. Not measured on a GPU: its kernels keep other statistics, and where
        it has no fused attention (float64) also T x T matrices.
        """
        parts = self.parts(layer)
        between = (len(parts) - 1) * self.block * self.width  # the residual stream, where one part meets the next
        return between + sum(part.saved() for part in parts)

    def forward_flops(self, layer: int) -> int:
        """FLOPs of the layer's matrix products for one sequence; a backward pass takes twice as many."""
        return sum(part.flops() for part in self.parts(layer))

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Elements of every value in a program whose microbatches are `rows` sequences.

        The optimizer state is AdamW's two moments. Activation 0 counts its tokens as elements (they are int64); its
        gradient, which does not exist, has the same entry.
        """
        if rows < 1:
            raise UserError(f"a microbatch of {rows} sequences is empty; it needs at least 1")
        weights = tuple(self.layout(layer).numel for layer in range(self.layers))
        return Sizes(
            weights=weights,
            opt_states=tuple(2 * elements for elements in weights),
            activations=tuple(rows * math.prod(self.activation_shape(i)) for i in range(self.layers + 1)),
            saved=tuple(rows * self.saved_elements(layer) for layer in range(self.layers)),
            element_bytes=dict.fromkeys(Kind, element_bytes),
        )
