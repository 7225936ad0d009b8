"""GPT, with nanoGPT's architecture, and the choices that later transformers make otherwise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from shardlab.errors import UserError
from shardlab.models.attention import RopeScaling, attention
from shardlab.models.blocks import Blocks
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import ACTIVATIONS, Activation, DropoutSite, feed_forward

NormKind = Literal["layer", "rms"]


@dataclass(frozen=True, kw_only=True)
class GPT(Blocks):
    """A pre-norm transformer: causal attention, a GELU MLP four times as wide, learned positions (karpathy/nanoGPT).

    >>> GPT(layers=12, heads=12, hidden_size=768, vocabulary=50304, seq_len=1024).parameter_count
    163109376

    Attributes:
        heads: attention heads, each `hidden_size / heads` features wide.
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` neighbouring heads (None: as many).
        tied: the head uses the token embedding instead of a matrix of its own (Press and Wolf 2017, arXiv 1608.05859).
            With more than one layer, the embedding and the head are layers of their own.
        ffn_hidden_size: features inside each MLP (None: 4 x hidden_size).
        activation: of the MLPs: gelu, gelu_tanh, squared_relu or swiglu.
        norm: layer, or rms (RMSNorm).
        norm_eps: what norms add to the variance, or to the mean square.
        rope_theta: the base of rotary position embeddings (None: positions are learned).
        rope_scaling: how its slower frequencies are stretched for contexts longer than the first one (None: not).
    """

    heads: int = 4
    kv_heads: int | None = None
    tied: bool = False
    ffn_hidden_size: int | None = None
    activation: Activation = "gelu"
    norm: NormKind = "layer"
    norm_eps: float = 1e-5
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("heads")
        if self.hidden_size % self.heads:
            raise UserError(
                f"hidden_size {self.hidden_size} does not divide by {self.heads} heads (remainder "
                f"{self.hidden_size % self.heads}); choose one that is a multiple of the heads"
            )
        if self.kv_heads is not None:
            self.at_least_one("kv_heads")
            if self.heads % self.kv_heads:
                raise UserError(
                    f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly (remainder "
                    f"{self.heads % self.kv_heads}); choose a number of key/value heads that divides the heads"
                )
        if self.ffn_hidden_size is not None:
            self.at_least_one("ffn_hidden_size")
        self._check_choices()

    def _check_choices(self) -> None:
        if self.activation not in ACTIVATIONS:
            raise UserError(f"activation is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}")
        if self.norm not in ("layer", "rms"):
            raise UserError(f"norm is {self.norm!r}; choose layer or rms")
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"norm_eps is {self.norm_eps}; give a small positive number, such as 1e-5")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))  # a list, if it was read from a file
            self._check_scaling()
        if self.rope_theta is None:
            return
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"rope_theta is {self.rope_theta}; the base of the rotary angles is a positive number")
        if self.hidden_size // self.heads % 2:
            raise UserError(
                f"rotary positions turn pairs of features, but a head has {self.hidden_size // self.heads} (width "
                f"{self.hidden_size} / {self.heads} heads); choose a width that is a multiple of twice the heads"
            )

    def _check_scaling(self) -> None:
        scaling = tuple[object, ...](self.rope_scaling or ())
        numbers = [each for each in scaling if isinstance(each, int | float) and 0 < each < math.inf]
        if self.rope_theta is None:
            raise UserError("rope_scaling stretches rotary positions, but these are learned; give rope_theta as well")
        if len(numbers) != 4 or len(scaling) != 4 or numbers[1] >= numbers[2]:
            raise UserError(
                f"rope_scaling is {list(scaling)}; give four positive numbers: factor, low_freq_factor, a larger "
                "high_freq_factor, and the original context in tokens"
            )

    @property
    def hidden(self) -> int:
        """Features inside each MLP."""
        return 4 * self.hidden_size if self.ffn_hidden_size is None else self.ffn_hidden_size

    @property
    def positions(self) -> bool:
        return self.rope_theta is None

    @property
    def rms(self) -> bool:
        return self.norm == "rms"

    @property
    def epsilon(self) -> float:
        return self.norm_eps

    @property
    def has_tied_head(self) -> bool:
        return self.tied

    def attention_part(self) -> tuple[Primitive, ...]:
        """Norm, attention, sum with the residual stream."""
        heads, kv_heads, drops = self.heads, self.kv_heads or self.heads, self.dropout > 0
        rope = self.rope_theta, self.rope_scaling
        body = attention(self.seq_len, self.hidden_size, heads, kv_heads, self.bias, drops, *rope)
        return self.norm_of("ln_1"), *body, self.add(DropoutSite.ATTENTION_OUTPUT, "attn.c_proj.bias")

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        body = feed_forward(self.seq_len, self.hidden_size, self.hidden, self.bias, self.activation)
        added = self.add(DropoutSite.FEED_FORWARD_OUTPUT, "mlp.c_proj.bias")
        return ("attention", self.attention_part()), ("feed-forward", (self.norm_of("ln_2"), *body, added))
