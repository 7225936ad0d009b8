"""Architectures: GPT, Llama, mixtures of experts, and an MLP without attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from shardlab.common.calls import public_class
from shardlab.common.errors import UserError
from shardlab.models.attention import LatentSizes, RopeScaling, attention, latent_attention
from shardlab.models.layout import aligned
from shardlab.models.mixture import Router, mixture
from shardlab.models.model import Blocks
from shardlab.models.primitives import Activation, DropoutSite, Primitive, feed_forward

NormKind = Literal["layer", "rms"]


@public_class
@dataclass(frozen=True, kw_only=True)
class GPT(Blocks):
    """Pre-norm transformer. By default: causal attention, a GELU MLP four times as wide, learned positions
    (karpathy/nanoGPT).

    >>> GPT(layers=12, heads=12, hidden_size=768, vocab_size=50304, seq_len=1024).parameter_count
    163109376

    Attributes:
        heads: attention heads.
        head_dim: features of a head (None: `hidden_size / heads`).
        kv_heads: heads of keys and values, each shared by `heads / kv_heads` neighbouring heads (None: `heads`).
        tied: the head uses the token embedding instead of a matrix of its own (Press and Wolf 2017, arXiv 1608.05859).
            If `layers` is above 1, the embedding and the head then become separate layers of the program.
        ffn_hidden_size: features inside each MLP (None: 4 x hidden_size).
        activation: activation function of the MLPs: gelu, gelu_tanh, squared_relu, swiglu or geglu.
        norm: `layer` (LayerNorm) or `rms` (RMSNorm).
        norm_eps: number that norms add to the variance, or to the mean square.
        rope_theta: the base of rotary position embeddings (None: positions are learned).
        rope_scaling: scaling of the slower frequencies for contexts longer than the original one (None: no scaling).
        kv_rank: features of the latent of keys and values, in multi-head latent attention (DeepSeek-V2, arXiv
            2405.04434, section 2.1; None: other attention). `head_dim` then counts the features of a head's query and
            key that are not rotated, and the features of its value.
        q_rank: features of the latent of queries (None: queries are projected from the token itself).
        rope_dim: in latent attention, features of a head's query and of the shared key that are rotated.
        qk_norm: whether every head's query and key are normalised before their rotation, with one weight vector per
            head (Qwen3 shares one vector among all heads of a layer, which is not supported).
        drops_attention: whether dropout also acts on the probabilities of attention.
        qkv_bias: whether the projection to queries, keys and values has a bias even if nothing else has (Qwen2).
    """

    heads: int = 4
    head_dim: int | None = None
    kv_heads: int | None = None
    tied: bool = False
    ffn_hidden_size: int | None = None
    activation: Activation = "gelu"
    norm: NormKind = "layer"
    norm_eps: float = 1e-5
    rope_theta: float | None = None
    rope_scaling: RopeScaling | None = None
    kv_rank: int | None = None
    q_rank: int | None = None
    rope_dim: int = 64
    qk_norm: bool = False
    qkv_bias: bool = False
    drops_attention: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("heads", "head_dim", "kv_heads", "ffn_hidden_size")
        if self.head_dim is None and self.hidden_size % self.heads:
            raise UserError(
                f"hidden_size {self.hidden_size} does not divide by {self.heads} heads (remainder "
                f"{self.hidden_size % self.heads}); choose one that is a multiple of the heads, or give head_dim"
            )
        if self.kv_heads is not None and self.heads % self.kv_heads:
            raise UserError(
                f"{self.heads} heads cannot share {self.kv_heads} key/value heads evenly (remainder "
                f"{self.heads % self.kv_heads}); choose a number of key/value heads that divides the heads"
            )
        self._check_choices()

    @property
    def hidden(self) -> int:
        """Features inside each MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden_size // self.heads

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
        """Primitives of the attention half of a block: norm, attention, sum with the residual stream."""
        heads, drops = self.heads, self.dropout > 0 and self.drops_attention
        if self.kv_rank is not None:
            assert self.rope_theta is not None
            sizes = LatentSizes(
                hidden_size=self.hidden_size, heads=heads, q_rank=self.q_rank, kv_rank=self.kv_rank,
                nope_dim=self.head_size, rope_dim=self.rope_dim, value_dim=self.head_size,
            )  # fmt: skip
            body = latent_attention(self.seq_len, sizes, drops, self.norm_eps, self.rope_theta, self.rope_scaling)
        else:
            body = attention(
                tokens=self.seq_len, hidden_size=self.hidden_size, heads=heads, kv_heads=self.kv_heads or heads,
                head_dim=self.head_size, bias=self.bias or self.qkv_bias, drops=drops, rope_theta=self.rope_theta,
                rope_scaling=self.rope_scaling, norm_eps=self.norm_eps if self.qk_norm else None,
            )  # fmt: skip
        return self.norm_of("ln_1"), *body, self.add(DropoutSite.ATTENTION_OUTPUT, "attn.c_proj.bias")

    def feed_forward_part(self, hidden: int) -> tuple[Primitive, ...]:
        """Primitives of the feed-forward half of a block, with `hidden` features inside the MLP."""
        body = feed_forward(self.seq_len, self.hidden_size, hidden, self.bias, self.activation)
        return self.norm_of("ln_2"), *body, self.add(DropoutSite.FEED_FORWARD_OUTPUT, "mlp.c_proj.bias")

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        return ("attention", self.attention_part()), ("feed-forward", self.feed_forward_part(self.hidden))

    def _check_choices(self) -> None:
        if not 0 < self.norm_eps < math.inf:
            raise UserError(f"norm_eps is {self.norm_eps}; give a small positive number, such as 1e-5")
        if self.rope_scaling is not None:
            object.__setattr__(self, "rope_scaling", tuple(self.rope_scaling))  # a file gives a list
            self._check_scaling()
        if self.kv_rank is not None:
            self._check_latents()
        if self.rope_theta is None:
            return
        if not 0 < self.rope_theta < math.inf:
            raise UserError(f"rope_theta is {self.rope_theta}; the base of the rotary angles is a positive number")
        if self.head_size % 2 and self.kv_rank is None:
            sizes_text = f" (hidden_size {self.hidden_size} / {self.heads} heads)" if self.head_dim is None else ""
            multiple = f"a hidden_size that is a multiple of {2 * self.heads}"
            remedy = multiple if self.head_dim is None else "an even head_dim"
            raise UserError(
                f"rotary positions turn pairs of features, but a head has {self.head_size}{sizes_text}; choose {remedy}"
            )

    def _check_latents(self) -> None:
        self.at_least_one("kv_rank", "rope_dim", "q_rank")
        wrong = {
            "rope_theta is None": self.rope_theta is None,
            f"kv_heads is {self.kv_heads}": self.kv_heads not in (None, self.heads),
            "qk_norm is true": self.qk_norm,
            "qkv_bias is true": self.qkv_bias,
            f"rope_dim is {self.rope_dim}, an odd number": self.rope_dim % 2 == 1,
        }
        if conflicts := [text for text, is_wrong in wrong.items() if is_wrong]:
            raise UserError(
                f"{', '.join(conflicts)}, but latent attention (kv_rank {self.kv_rank}) rotates an even number of "
                "features, has no biases and no other norms, and as many keys as queries; change these fields"
            )

    def _check_scaling(self) -> None:
        scaling = tuple[object, ...](self.rope_scaling or ())
        numbers = [number for number in scaling if isinstance(number, int | float) and 0 < number < math.inf]
        if self.rope_theta is None:
            raise UserError("rope_scaling stretches rotary positions, but these are learned; give rope_theta as well")
        if len(numbers) != 4 or len(scaling) != 4 or numbers[1] >= numbers[2]:
            raise UserError(
                f"rope_scaling is {list(scaling)}; give four positive numbers: factor, low_freq_factor, a larger "
                "high_freq_factor, and the original context in tokens"
            )


MOST_EXPERTS = 256
"""Largest number of experts of a layer. An expert's number is passed on beside the residual stream in the compute
dtype, and bfloat16 is exact up to this number."""


@public_class
@dataclass(frozen=True, kw_only=True)
class MoE(GPT):
    """GPT with a mixture of experts in place of every MLP.

    The router's softmax is over all experts. With one choice, a token's result is weighted by its probability (Fedus et
    al. 2021, arXiv 2101.03961). With several choices, the weights are their probabilities, divided by the sum (Lepikhin
    et al. 2020, arXiv 2006.16668, section 2.2; Jiang et al. 2024, arXiv 2401.04088). First choices take slots before
    second choices, and earlier tokens before later ones. A token without a slot passes by on the residual stream.

    >>> MoE(experts=8, top_k=2).parameter_count > GPT().parameter_count
    True

    Attributes:
        experts: number of experts of every layer, each with the size of GPT's MLP (`ffn_hidden_size`).
        shared_experts: number of experts that process every token, computed as one expert that is wider by this factor.
            They read the router's input (Dai et al. 2024, arXiv 2401.06066, eq. 9).
        shared_ffn_hidden_size: features inside each shared expert (None: as many as inside another expert).
        dense_layers: number of layers at the start with one MLP for all tokens in place of experts (ibid., section
            4.1).
        dense_ffn_hidden_size: features inside the MLP of such a layer (None: as many as inside an expert).
        top_k: number of experts that a token is sent to.
        capacity_factor: an expert's slots for a microbatch, as a multiple of top_k * tokens / experts. None: dropless,
            with a slot for every token at every expert. Each buffer then has experts * tokens * width elements, the
            most that can arrive.
        auxiliary: weight of the load-balancing loss, which is the mean over microbatches. It contributes to the
            gradient. The reported loss is the cross-entropy alone.
    """

    experts: int = 4
    shared_experts: int = 0
    shared_ffn_hidden_size: int | None = None
    dense_layers: int = 0
    dense_ffn_hidden_size: int | None = None
    top_k: int = 2
    capacity_factor: float | None = 1.25
    auxiliary: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("experts", "top_k", "shared_ffn_hidden_size", "dense_ffn_hidden_size")
        for name in ("shared_experts", "dense_layers"):
            if (count := getattr(self, name)) < 0:
                raise UserError(f"{name} is {count}; there may be 0 or more")
        if self.experts > MOST_EXPERTS:
            raise UserError(f"experts is {self.experts}; there may be {MOST_EXPERTS} at most")
        if self.top_k > self.experts:
            raise UserError(
                f"top_k is {self.top_k}, but there are {self.experts} experts; a token reaches an expert once, so "
                f"choose top_k of at most {self.experts}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UserError(
                f"capacity_factor is {self.capacity_factor}; give a positive number, or None to drop no token"
            )
        if not 0 <= self.auxiliary < math.inf:
            raise UserError(f"auxiliary is {self.auxiliary}; the load-balancing loss has a weight of 0 or more")

    @property
    def router(self) -> Router:
        """Router of every layer."""
        return Router(
            hidden_size=self.hidden_size,
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            auxiliary=self.auxiliary,
        )

    @property
    def leading_blocks(self) -> int:
        return min(self.dense_layers, self.layers)

    def leading_block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        hidden = self.dense_ffn_hidden_size or self.hidden
        return ("attention", self.attention_part()), ("feed-forward", self.feed_forward_part(hidden))

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        body = mixture(self.seq_len, self.router, self.hidden, self.bias, self.activation)
        experts = (*body, self.add(DropoutSite.FEED_FORWARD_OUTPUT))
        norm, hidden = self.norm_of("ln_2"), self.shared_experts * (self.shared_ffn_hidden_size or self.hidden)
        if not hidden:
            return ("attention", self.attention_part()), ("experts", (norm, *experts))
        shared = feed_forward(self.seq_len, self.hidden_size, hidden, self.bias, self.activation, shared=True)
        added = replace(self.add(DropoutSite.SHARED_EXPERTS_OUTPUT), branch="y")
        return ("attention", self.attention_part()), ("shared experts", (norm, *shared, added)), ("experts", experts)


ROUND = 32
"""Multiple to which the default hidden features of SwiGLU are rounded up."""


@public_class
@dataclass(frozen=True, kw_only=True)
class Llama(GPT):
    """GPT with RMSNorm, rotary positions and SwiGLU, without biases (Touvron et al. 2023, arXiv 2302.13971, 2.2).

    Llama 3 has fewer key/value heads than heads (arXiv 2407.21783, section 3.2). Llama 3.1 rescales frequencies for
    contexts longer than 8192 tokens (`rope_scaling`).

    >>> Llama(hidden_size=48, heads=4, kv_heads=2).hidden
    128

    Attributes:
        ffn_hidden_size: features inside each MLP (None: 8/3 x hidden_size, to the next multiple of 32).
    """

    bias: bool = False
    activation: Activation = "swiglu"
    norm: NormKind = "rms"
    rope_theta: float | None = 500_000.0

    @property
    def hidden(self) -> int:
        return self.ffn_hidden_size or _two_thirds(self.hidden_size)


@public_class
@dataclass(frozen=True, kw_only=True)
class Mixtral(MoE):
    """Mixture of SwiGLU experts between Llama's attentions (Jiang et al. 2024, arXiv 2401.04088, section 2)."""

    bias: bool = False
    activation: Activation = "swiglu"
    norm: NormKind = "rms"
    rope_theta: float | None = 1_000_000.0

    @property
    def hidden(self) -> int:
        return self.ffn_hidden_size or _two_thirds(self.hidden_size)


@public_class
@dataclass(frozen=True, kw_only=True)
class MLP(Blocks):
    """GPT without attention and positions: residual pre-norm GELU MLPs, which process each token separately.

    It is the smallest language model, and predicts the next token from the last token only.

    Attributes:
        ffn_hidden_size: features inside each MLP (None: 4 x hidden_size).
    """

    ffn_hidden_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("ffn_hidden_size")

    @property
    def hidden(self) -> int:
        """Features inside each MLP."""
        return self.ffn_hidden_size or 4 * self.hidden_size

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        body = feed_forward(self.seq_len, self.hidden_size, self.hidden, self.bias, "gelu")
        added = self.add(DropoutSite.FEED_FORWARD_OUTPUT, "mlp.c_proj.bias")
        return (("feed-forward", (self.norm_of("ln_2"), *body, added)),)


def _two_thirds(hidden_size: int) -> int:
    """Return the hidden features with which a SwiGLU has as many parameters as an MLP with 4 x hidden_size hidden
    features (Shazeer 2020, arXiv 2002.05202), rounded up to a multiple of ROUND.
    """
    return aligned(-(-8 * hidden_size // 3), ROUND)
