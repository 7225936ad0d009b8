"""GPT, with nanoGPT's architecture."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.blocks import Blocks
from shardlab.models.parts import Attention, Embedding, FeedForward, Head, Part
from shardlab.program.errors import UserError


@dataclass(frozen=True, kw_only=True)
class GPT(Blocks):
    """A pre-norm transformer: causal attention, a GELU MLP four times as wide, learned positions (karpathy/nanoGPT).

    >>> GPT(layers=12, heads=12, width=768, vocabulary=50304, block=1024).parameter_count
    163109376

    Attributes:
        heads: attention heads, each `width / heads` features wide.
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` neighbouring heads (None: as many).
        tied: the head uses the token embedding instead of a matrix of its own (Press and Wolf 2017, arXiv 1608.05859).
            With more than one layer, such a model is trained in half-blocks.
    """

    heads: int = 4
    kv_heads: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("heads")
        if self.width % self.heads:
            raise UserError(
                f"width {self.width} does not divide by {self.heads} heads (remainder {self.width % self.heads}); "
                "choose a width that is a multiple of the heads"
            )
        if self.kv_heads is not None:
            self.at_least_one("kv_heads")
            if self.heads % self.kv_heads:
                raise UserError(
                    f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly (remainder "
                    f"{self.heads % self.kv_heads}); choose a number of key/value heads that divides the heads"
                )

    @property
    def embedding(self) -> Part:
        return Embedding(*self.common, vocabulary=self.vocabulary, positions=True)

    @property
    def body(self) -> tuple[Part, ...]:
        attention = Attention(*self.common, heads=self.heads, kv_heads=self.kv_heads or self.heads)
        return attention, FeedForward(*self.common, hidden=4 * self.width)

    @property
    def head(self) -> Part:
        return Head(*self.common, vocabulary=self.vocabulary, tied=self.tied)
