"""What layers are made of: for each part its parameters, what autograd keeps for it, and its arithmetic.

The tensor half (`shardlab.models.tensors`) computes the same parts; a test holds the two together. Everything
is counted for one sequence, with T = `block` tokens and C = `width`. Every part but `Embedding` maps (T, C)
onward and begins with a LayerNorm, which keeps the part's input; `saved` counts what is kept beyond that input.

Between its norm and its sum with the residual stream lies a part's *body*, which tensor parallelism slices as
Megatron-LM does (Shoeybi et al. 2019, arXiv 1909.08053, section 3): the parameters that have a `cut` are the body's.

FLOPs are those of matrix products in the forward pass, an addition and a multiplication each (Narayanan et al.
2021, arXiv 2104.04473, appendix: 24 T C^2 + 4 T^2 C a layer, and 2 T C V for the logits). As there, attention
counts the whole T x T square although its upper half is masked; look-ups, norms, softmax, GELU and sums count 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from shardlab.models.layout import Cut, Parameter


@dataclass(frozen=True)
class Part(ABC):
    """Some of a layer's arithmetic.

    Attributes:
        block: tokens of a sequence, T.
        width: features of a token, C.
        bias: whether linear maps and norms have a bias.
        drops: whether dropout is on, so that its masks are kept.
        norm_name: of the norm that the part begins with (none: it has none).
        added: the parameter that is added to the body's result (none: nothing is).
    """

    norm_name: ClassVar[str] = ""
    added: ClassVar[str] = ""

    block: int
    width: int
    bias: bool
    drops: bool

    @abstractmethod
    def parameters(self) -> list[Parameter]:
        """The parameters, named as in nanoGPT."""

    @abstractmethod
    def saved(self) -> int:
        """Elements that autograd keeps for the backward pass beyond the part's input and parameters."""

    def microbatch_saved(self, rows: int) -> int:
        """`saved` for a microbatch of `rows` sequences."""
        return rows * self.saved()

    @abstractmethod
    def saved_for_weight(self) -> int:
        """What is left of that between the halves of a split backward pass: the inputs of norms and linear maps and the
        gradients of their outputs; the part's input does not count.
        """

    def body_saved_for_weight(self) -> int:
        """The same for the body alone: what linear maps after the first one read, and the gradient of the first."""
        return 0

    @abstractmethod
    def body_saved(self) -> int:
        """Elements that autograd keeps for the body, beyond its input and parameters; slices share them equally."""

    @abstractmethod
    def flops(self) -> int:
        """FLOPs of the forward pass."""

    def sliceable(self) -> dict[str, int]:
        """What must divide by the number of slices, by name."""
        return {}

    @property
    def stream(self) -> int:
        """Elements of the residual stream, T C."""
        return self.block * self.width

    @property
    def norm_saved(self) -> int:
        """A LayerNorm keeps each token's mean and 1/deviation; its output is kept by the linear map that follows."""
        return 2 * self.block + self.stream

    def norm(self) -> list[Parameter]:
        return [
            Parameter(f"{self.norm_name}.{end}", (self.width,), False) for end in ("weight", "bias")[: 1 + self.bias]
        ]

    def linear(self, name: str, outputs: int, inputs: int, cut: Cut) -> list[Parameter]:
        """A map whose slices make some of the outputs (cut along 0), or take some of the inputs (along 1)."""
        weight = Parameter(f"{name}.weight", (outputs, inputs), True, cut)
        bias = Parameter(f"{name}.bias", (outputs,), False, cut if cut.dim == 0 else None)
        return [weight, bias] if self.bias else [weight]


@dataclass(frozen=True)
class Embedding(Part):
    """Tokens (T,) to the residual stream (T, C), with learned positions if `positions`; dropout.

    Sliced by vocabulary: the tokens of other slices give zero.
    """

    added = "wpe.weight"

    vocabulary: int
    positions: bool

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


@dataclass(frozen=True)
class Attention(Part):
    """Norm, causal scaled dot product attention, projection, dropout; added to the residual stream.

    With fewer `kv_heads` than heads, neighbouring heads share keys and values (grouped queries, Ainslie et al. 2023,
    arXiv 2305.13245). Without dropout, attention is one fused op that keeps the log-sum-exp of each head's rows; with
    it, three T x T matrices a head: the softmax, its mask, and the product of both. Sliced by heads.
    """

    norm_name = "ln_1"
    added = "attn.c_proj.bias"

    heads: int
    kv_heads: int

    @property
    def kv_width(self) -> int:
        """Features of all keys of a token, and of all values."""
        return self.width // self.heads * self.kv_heads

    def heads_of(self, slices: int) -> Attention:
        """As if the heads of one slice of so many were all."""
        return replace(self, width=self.width // slices, heads=self.heads // slices, kv_heads=self.kv_heads // slices)

    def parameters(self) -> list[Parameter]:
        c, kv = self.width, self.kv_width
        features = self.linear("attn.c_attn", c + 2 * kv, c, Cut(0, (c, kv, kv)))
        return [*self.norm(), *features, *self.linear("attn.c_proj", c, c, Cut(1))]

    def saved(self) -> int:
        return self.norm_saved + self.body_saved() + self.drops * self.stream

    def saved_for_weight(self) -> int:
        return self.norm_saved + self.body_saved_for_weight() + 2 * self.stream

    def body_saved_for_weight(self) -> int:
        mixed, queries_keys_values = self.stream, self.stream + 2 * self.block * self.kv_width
        return mixed + queries_keys_values

    def body_saved(self) -> int:
        queries_keys_values, mixed = 3 * self.stream, self.stream  # shared keys and values are kept once for each head
        scores = self.heads * self.block * (3 * self.block if self.drops else 1)
        return queries_keys_values + scores + mixed

    def flops(self) -> int:
        t, c = self.block, self.width
        return 2 * t * c * (c + 2 * self.kv_width) + 2 * (2 * t * t * c) + 2 * t * c * c

    def sliceable(self) -> dict[str, int]:
        return {"heads": self.heads, "key/value heads": self.kv_heads}


@dataclass(frozen=True)
class FeedForward(Part):
    """Norm, linear map to `hidden` features, exact GELU, linear map back, dropout; added to the residual stream.

    Sliced by hidden features.
    """

    norm_name = "ln_2"
    added = "mlp.c_proj.bias"

    hidden: int

    def parameters(self) -> list[Parameter]:
        c, hidden = self.width, self.hidden
        return [
            *self.norm(),
            *self.linear("mlp.c_fc", hidden, c, Cut(0)),
            *self.linear("mlp.c_proj", c, hidden, Cut(1)),
        ]

    def saved(self) -> int:
        return self.norm_saved + self.body_saved() + self.drops * self.stream

    def saved_for_weight(self) -> int:
        return self.norm_saved + self.body_saved_for_weight() + 2 * self.stream

    def body_saved_for_weight(self) -> int:
        return 2 * self.block * self.hidden

    def body_saved(self) -> int:
        return 2 * self.block * self.hidden

    def flops(self) -> int:
        return 2 * (2 * self.block * self.width * self.hidden)

    def sliceable(self) -> dict[str, int]:
        return {"hidden features": self.hidden}


@dataclass(frozen=True)
class Head(Part):
    """Norm, then a score (logit) for every token of the vocabulary: (T, C) to (T, vocabulary).

    If `tied`, the scores are products with the token embedding, and there is no matrix of its own. Sliced by
    vocabulary.
    """

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
