"""The smallest language model: it guesses the next token from the last one alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.models.blocks import Blocks
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import DropoutSite, feed_forward


@dataclass(frozen=True, kw_only=True)
class MLP(Blocks):
    """A GPT without attention and positions: every token goes its own way through residual pre-norm GELU MLPs.

    Attributes:
        ffn_hidden_size: features inside each MLP (None: 4 x hidden_size).
    """

    ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ffn_hidden_size is not None:
            self.at_least_one("ffn_hidden_size")

    @property
    def hidden(self) -> int:
        """Features inside each MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        body = feed_forward(self.seq_len, self.hidden_size, self.hidden, self.bias, "gelu")
        added = self.add(DropoutSite.FEED_FORWARD_OUTPUT, "mlp.c_proj.bias")
        return (("feed-forward", (self.norm_of("ln_2"), *body, added)),)
