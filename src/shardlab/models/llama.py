"""Llama, and mixtures of experts that are made of its parts."""

from __future__ import annotations

from dataclasses import dataclass

from shardlab.models.gpt import GPT, NormKind
from shardlab.models.layout import aligned
from shardlab.models.moe import MoE
from shardlab.models.primitives import Activation

ROUND = 32
"""SwiGLU's hidden features are a multiple of this unless they are given."""


def _two_thirds(hidden_size: int) -> int:
    """Hidden features of a SwiGLU with as many parameters as an MLP of 4 x width (Shazeer 2020, arXiv 2002.05202)."""
    return aligned(-(-8 * hidden_size // 3), ROUND)


@dataclass(frozen=True, kw_only=True)
class Llama(GPT):
    """A GPT with RMSNorm, rotary positions and SwiGLU, without biases (Touvron et al. 2023, arXiv 2302.13971, 2.2).

    Llama 3 has fewer key/value heads than heads (arXiv 2407.21783, section 3.2). Llama 3.1
    rescales frequencies for contexts longer than 8192 tokens (`rope_scaling`).

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


@dataclass(frozen=True, kw_only=True)
class Mixtral(MoE):
    """A mixture of SwiGLU experts between Llama's attentions (Jiang et al. 2024, arXiv 2401.04088, section 2)."""

    bias: bool = False
    activation: Activation = "swiglu"
    norm: NormKind = "rms"
    rope_theta: float | None = 1_000_000.0

    @property
    def hidden(self) -> int:
        return self.ffn_hidden_size or _two_thirds(self.hidden_size)
