"""What layers are made of: for each part its parameters, what autograd keeps for it, and its arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.attention import Attention
from shardlab.models.feed_forward import FeedForward
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter
from shardlab.models.part import Part

__all__ = ["Attention", "Embedding", "FeedForward", "Head", "Part"]


@dataclass(frozen=True)
class Embedding(Part):
    """Tokens (T,) to the residual stream (T, C), with learned positions if `positions`; dropout.

    Sliced by vocabulary: the tokens of other slices give zero.
    """

    title = "embedding"

    added = "wpe.weight"

    vocabulary: int
    positions: bool

    @property
    def has_added(self) -> bool:
        return self.positions

    def parameters(self) -> list[Parameter]:
        tokens = Parameter("wte.weight", (self.vocabulary, self.width), True, Cut(0))
        return [tokens, Parameter("wpe.weight", (self.block, self.width), True)] if self.positions else [tokens]

    def saved(self) -> int:
        return self.drops * self.stream

    def saved_for_weight(self) -> int:
        return self.stream

    def body_saved(self) -> int:
        return 0

    def flops(self) -> int:
        return 0

    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """On the way back a gradient of the whole matrix is made, and the tokens' rows are added to it."""
        elements, matrix = sequences * tokens * self.width, -(-self.vocabulary // slices) * self.width
        return (Pointwise("embedding", 2 * elements, 3 * elements + matrix),)

    def kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return (*self.body_kernels(sequences, tokens, slices), *self.added_kernels(sequences, tokens))

    def added_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """Positions and dropout; there is no residual yet."""
        elements, matrix = sequences * tokens * self.width, tokens * self.width
        positions = (Pointwise("positions", 2 * elements + matrix, elements + matrix),) if self.positions else ()
        dropout = (Pointwise("dropout", 3 * elements, 3 * elements),) if self.drops else ()
        return (*positions, *dropout)


@dataclass(frozen=True)
class Head(Part):
    """Norm, then a score (logit) for every token of the vocabulary: (T, C) to (T, vocabulary).

    If `tied`, the scores are products with the token embedding, and there is no matrix of its own. Sliced by
    vocabulary.
    """

    title = "head"
    norm_name = "ln_f"

    vocabulary: int
    tied: bool

    def parameters(self) -> list[Parameter]:
        matrix = Parameter("lm_head.weight", (self.vocabulary, self.width), True, Cut(0))
        return self.norm() if self.tied else [*self.norm(), matrix]

    def saved(self) -> int:
        return self.norm_saved

    def saved_for_weight(self) -> int:
        return self.norm_saved + self.stream

    def body_saved(self) -> int:
        return 0

    def flops(self) -> int:
        return 2 * self.block * self.width * self.vocabulary

    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return (Matmul(sequences * tokens, -(-self.vocabulary // slices), self.width),)

    def residual_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """Logits are added to nothing."""
        return ()
