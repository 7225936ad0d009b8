"""What every model is: a list of layers, from tokens to logits."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardlab.errors import UserError
from shardlab.models.kernels import Kernel, Pointwise
from shardlab.models.layout import LayerLayout
from shardlab.program.sizes import CARRYING, LayerKind, Sizes
from shardlab.rules.kind import Kind


@dataclass(frozen=True, kw_only=True)
class Model(ABC):
    """A language model, cut into the layers of a program. Activation l enters layer l.

    Attributes:
        layers: layers of the program.
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

    @abstractmethod
    def layout(self, layer: int) -> LayerLayout:
        """Where the layer's parameters lie in its flat buffer."""

    @abstractmethod
    def activation_shape(self, index: int) -> tuple[int, ...]:
        """Shape of activation `index` for one sequence: int64 tokens at first, logits at last."""

    @abstractmethod
    def saved_elements(self, layer: int) -> int:
        """Elements that autograd keeps between the layer's forward and backward, for one sequence in training.

        Beyond the layer's inputs and its parameters; exactly what is measured on a CPU. All are of the
        compute dtype, but for attention's log-sum-exp (without dropout): it is float32 in half precision, so that
        `heads * block` elements count twice there. Not measured on a GPU: its kernels keep other statistics, and where
        it has no fused attention (float64) also T x T matrices.
        """

    @abstractmethod
    def saved_for_weight(self, layer: int) -> int:
        """Elements that are left of that between the halves of a split backward pass, for one sequence.

        With the gradients that the first half leaves for the second, beyond that of the layer's output. So it is from
        the second time on: in the first, it is not yet known what the second half reads, and all stays.
        """

    @abstractmethod
    def place(self, layer: int) -> str:
        """Where a layer of the program stands in the model, as a reader knows it: `block 31, feed-forward`."""

    @abstractmethod
    def forward_flops(self, layer: int) -> int:
        """FLOPs of the layer's matrix products for one sequence; a backward pass takes twice as many."""

    @abstractmethod
    def kernels(self, layer: int, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """What the layer's forward pass asks of a device.

        Args:
            layer: its number.
            sequences: of the microbatches that are computed together.
            tokens: of each sequence that are here, at most `block`.
            slices: that the layer's parameters are cut into, if they are cut; one of them is computed.
        """

    def attend_kernels(
        self, layer: int, sequences: int, queries: int, keys: int, seen: float, slices: int = 1
    ) -> tuple[Kernel, ...]:
        """What queries that layer `layer` made ask, when they meet keys and values: for models cut for `cp`.

        Args:
            layer: its number.
            sequences: of the microbatches that are computed together.
            queries, keys: tokens of each sequence.
            seen: the part of the pairs of queries and keys in which the query comes no earlier than the key.
            slices: that heads are cut into.
        """
        raise AssertionError(f"attention is no op of its own in {type(self).__name__}")

    @property
    def logits(self) -> int:
        """Scores of a token, those of padding included."""
        return self.vocabulary

    def loss_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """Cross-entropy of one of `slices` slices of the vocabulary; its backward kernels make the logits' gradient.

        A LOSS op does both at once. Where the vocabulary is sliced, LOSS_STATS is the first and LOSS the second.
        """
        logits = sequences * tokens * self.logits // slices
        return (Pointwise("cross_entropy", logits, 2 * logits),)

    def borrowed(self, layer: int) -> tuple[str, ...]:
        """The parameters of the first layer that this other layer computes with as well, by name: a tied embedding."""
        return ()

    @property
    def residual_width(self) -> int:
        """Features of a token in what is carried from layer to layer beside the activations, if anything is."""
        return self.width

    def microbatch_elements(self, index: int, rows: int) -> int:
        """Elements of activation `index` for a microbatch of `rows` sequences."""
        return rows * math.prod(self.activation_shape(index))

    def microbatch_saved(self, layer: int, rows: int) -> int:
        """`saved_elements` for a microbatch of `rows` sequences."""
        return rows * self.saved_elements(layer)

    @property
    def parameter_count(self) -> int:
        """Parameters of the whole model, without padding."""
        return sum(self.layout(layer).parameter_count for layer in range(self.layers))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """What each layer makes of its input."""
        return (LayerKind.WHOLE,) * self.layers

    @property
    def block_bounds(self) -> tuple[int, ...]:
        """Where blocks of several layers begin, and where the last one ends; none if layers are blocks themselves."""
        return ()

    @property
    def attention_features(self) -> tuple[int, int]:
        """Features of a token's queries, and of its keys and values, where layers make them for others to mix."""
        return (0, 0)

    def sizes(self, rows: int, element_bytes: int) -> Sizes:
        """Elements of every value in a program whose microbatches are `rows` sequences.

        The optimizer state is AdamW's two moments. Activation 0 counts its tokens as elements (they are int64); its
        gradient, which does not exist, has the same entry. A sliced layer's entries are of all its slices together.
        """
        if rows < 1:
            raise UserError(f"a microbatch of {rows} sequences is empty; it needs at least 1")
        weights = tuple(self.layout(layer).numel for layer in range(self.layers))
        return Sizes(
            weights=weights,
            opt_states=tuple(2 * elements for elements in weights),
            activations=tuple(self.microbatch_elements(i, rows) for i in range(self.layers + 1)),
            saved=tuple(self.microbatch_saved(layer, rows) for layer in range(self.layers)),
            saved_for_weight=tuple(rows * self.saved_for_weight(layer) for layer in range(self.layers)),
            element_bytes=dict.fromkeys(Kind, element_bytes),
            kinds=self.kinds,
            blocks=self.block_bounds,
            tied=bool(self.borrowed(self.layers - 1)),
            stats=3 * rows * self.block,
            residual=rows * self.block * self.residual_width if CARRYING.intersection(self.kinds) else 0,
            queries=rows * self.block * self.attention_features[0],
            keys_values=rows * self.block * self.attention_features[1],
        )
