"""What layers are made of: for each part its parameters, what autograd keeps for it, and its arithmetic.

The tensor half (`shardlab.models.tensors`) computes the same parts; a test holds the two together. Everything
is counted for one sequence, with T = `block` tokens and C = `width`. Every part but `Embedding` maps (T, C)
onward and begins with a LayerNorm, which keeps the part's input; `saved` counts what is kept beyond that input.

FLOPs are those of matrix products in the forward pass, an addition and a multiplication each (Narayanan et al.
2021, arXiv 2104.04473, appendix: 24 T C^2 + 4 T^2 C a layer, and 2 T C V for the logits). As there, attention
counts the whole T x T square although its upper half is masked; look-ups, norms, softmax, GELU and sums count 0.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from shardlab.models.layout import Parameter


@dataclass(frozen=True)
class Part(ABC):
    """Some of a layer's arithmetic.

    Attributes:
        block: tokens of a sequence, T.
        width: features of a token, C.
        bias: whether linear maps and norms have a bias.
        drops: whether dropout is on, so that its masks are kept.
    """

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

    @abstractmethod
    def flops(self) -> int:
        """FLOPs of the forward pass."""

    @property
    def stream(self) -> int:
        """Elements of the residual stream, T C."""
        return self.block * self.width

    @property
    def norm_saved(self) -> int:
        """A LayerNorm keeps each token's mean and 1/deviation; its output is kept by the linear map that follows."""
        return 2 * self.block + self.stream

    def norm(self, name: str) -> list[Parameter]:
        return [Parameter(f"{name}.{end}", (self.width,), False) for end in ("weight", "bias")[: 1 + self.bias]]

    def linear(self, name: str, outputs: int, inputs: int) -> list[Parameter]:
        weight = Parameter(f"{name}.weight", (outputs, inputs), True)
        return [weight, Parameter(f"{name}.bias", (outputs,), False)] if self.bias else [weight]


@dataclass(frozen=True)
class Embedding(Part):
    """Tokens (T,) to the residual stream (T, C), with learned positions if `positions`; dropout."""

    vocabulary: int
    positions: bool

    def parameters(self) -> list[Parameter]:
        tokens = Parameter("wte.weight", (self.vocabulary, self.width), True)
        return [tokens, Parameter("wpe.weight", (self.block, self.width), True)] if self.positions else [tokens]

    def saved(self) -> int:
        return self.drops * self.stream

    def flops(self) -> int:
        return 0


@dataclass(frozen=True)
class Attention(Part):
    """Norm, causal scaled dot product attention, projection, dropout; added to the residual stream.

    Without dropout, attention is one fused op that keeps the log-sum-exp of each head's rows; with it, three
    T x T matrices a head: the softmax, its mask, and the product of both.
    """

    heads: int

    def parameters(self) -> list[Parameter]:
        c = self.width
        return [*self.norm("ln_1"), *self.linear("attn.c_attn", 3 * c, c), *self.linear("attn.c_proj", c, c)]

    def saved(self) -> int:
        queries_keys_values, mixed, mask = 3 * self.stream, self.stream, self.drops * self.stream
        scores = self.heads * self.block * (3 * self.block if self.drops else 1)
        return self.norm_saved + queries_keys_values + scores + mixed + mask

    def flops(self) -> int:
        t, c = self.block, self.width
        return 2 * t * c * 3 * c + 2 * (2 * t * t * c) + 2 * t * c * c


@dataclass(frozen=True)
class FeedForward(Part):
    """Norm, linear map to `hidden` features, exact GELU, linear map back, dropout; added to the residual stream."""

    hidden: int

    def parameters(self) -> list[Parameter]:
        c, hidden = self.width, self.hidden
        return [*self.norm("ln_2"), *self.linear("mlp.c_fc", hidden, c), *self.linear("mlp.c_proj", c, hidden)]

    def saved(self) -> int:
        return self.norm_saved + 2 * self.block * self.hidden + self.drops * self.stream

    def flops(self) -> int:
        return 2 * (2 * self.block * self.width * self.hidden)


@dataclass(frozen=True)
class Head(Part):
    """Norm, then a score (logit) for every token of the vocabulary: (T, C) to (T, vocabulary).

    If `tied`, the scores are products with the token embedding, and there is no matrix of its own.
    """

    vocabulary: int
    tied: bool

    def parameters(self) -> list[Parameter]:
        matrix = Parameter("lm_head.weight", (self.vocabulary, self.width), True)
        return self.norm("ln_f") if self.tied else [*self.norm("ln_f"), matrix]

    def saved(self) -> int:
        return self.norm_saved

    def flops(self) -> int:
        return 2 * self.block * self.width * self.vocabulary
