"""The smallest language model: it guesses the next token from the last one alone."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.blocks import Blocks
from shardlab.models.parts import Embedding, FeedForward, Head, Part


@dataclass(frozen=True, kw_only=True)
class MLP(Blocks):
    """A GPT without attention and positions: every token goes its own way through residual pre-norm GELU MLPs.

    Attributes:
        ffn_hidden: features inside each MLP (None: 4 x width).
    """

    ffn_hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ffn_hidden is not None:
            self.at_least_one("ffn_hidden")

    @property
    def hidden(self) -> int:
        """Features inside each MLP."""
        return 4 * self.width if self.ffn_hidden is None else self.ffn_hidden

    @property
    def embedding(self) -> Part:
        return Embedding(**self.common, vocabulary=self.vocabulary, positions=False)

    @property
    def body(self) -> tuple[Part, ...]:
        return (FeedForward(**self.common, hidden=self.hidden),)

    @property
    def head(self) -> Part:
        return Head(**self.common, vocabulary=self.vocabulary, tied=False)
