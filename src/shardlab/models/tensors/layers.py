"""The layers as functions of tensors, in one form whichever way a model is cut into layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.columns import Matrix
from shardlab.models.halves import Body, Norm
from shardlab.models.parts import Attention, Embedding, FeedForward, Head, Part
from shardlab.models.tensors.activations import activated
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.parts import ALL, Share, add_branch, body_of, compute, norm_of
from shardlab.models.tensors.rotary import rotated

Tensors = tuple[Tensor | None, ...]


@dataclass(frozen=True)
class Layer(ABC):
    """One layer of a model, a function of its parameters and its inputs; it holds no tensor itself.

    Attributes:
        names: of the parameters, in the layout's order; then of those that it borrows.
    """

    names: tuple[str, ...]

    def run(
        self, parameters: Sequence[Tensor], inputs: Tensors, share: Share = ALL, dropout: Dropout | None = None
    ) -> Tensors:
        """The layer's outputs, rows first like its inputs.

        Args:
            parameters: in the layout's order; of one slice where the layer is sliced.
            share: which slice or which tokens are computed.
            dropout: the step's and the microbatches'; the layer's masks are those of the block that it is part of.
        """
        if dropout is not None and dropout.probability == 0:
            dropout = None
        return self.compute(dict(zip(self.names, parameters, strict=True)), inputs, share, dropout)

    def __call__(
        self, parameters: Sequence[Tensor], x: Tensor, dropout: Dropout | None = None, share: Share = ALL
    ) -> Tensor:
        """Activation l, (rows, *shape), to activation l + 1, for a layer with one input and one output."""
        (y,) = self.run(parameters, (x,), share, dropout)
        assert y is not None
        return y

    @abstractmethod
    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        """`run`, with the parameters by name, and without dropout of probability 0."""


@dataclass(frozen=True)
class BlockLayer(Layer):
    """(x,) to (y,): a block, with what comes before the first and after the last. It is not sliced."""

    parts: tuple[Part, ...]

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (x,) = inputs
        assert x is not None
        assert (share.of, share.tokens) == (1, None), f"a layer of whole blocks has no share {share}"
        for part in self.parts:
            x = compute(part, p, x, dropout, share)
        return (x,)


@dataclass(frozen=True)
class NormLayer(Layer):
    """(residual, branch) to (residual, normalised), for the share's tokens.

    The first norm is given no residual (None), and the last one hands none on. A residual handed on is memory of its
    own, never the branch's.
    """

    half: Norm
    last: bool

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        residual, branch = inputs
        assert branch is not None
        if dropout is not None:
            dropout = replace(dropout, layer=self.half.block_before)
        residual = add_branch(self.half.before, p, residual, branch, share, dropout)
        if residual is branch:
            residual = branch.clone()
        return None if self.last else residual, norm_of(self.half.after, p, residual)


@dataclass(frozen=True)
class BodyLayer(Layer):
    """(x,) to (branch,): all tokens; from a slice of the parameters, that slice's term of the branch.

    The head gives the slice's logits, -inf for tokens beyond the vocabulary.
    """

    half: Body

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (x,) = inputs
        assert x is not None
        if dropout is not None:
            dropout = replace(dropout, layer=self.half.block)
        return (body_of(self.half.part, p, x, share, dropout),)


@dataclass(frozen=True)
class ColumnLayer(Layer):
    """(x,) to (features,): one matrix; from a slice of its columns, that slice of the features, or of the logits."""

    half: Matrix

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (x,) = inputs
        assert x is not None
        part, weight = self.half.part, p[f"{self.half.name}.weight"]
        if isinstance(part, Embedding):
            return (F.embedding(x, weight),)
        if isinstance(part, Head):
            return (body_of(part, p, x, share, dropout),)
        made = F.linear(x, weight, p.get(f"{self.half.name}.bias"))
        if self.half.activates and isinstance(part, FeedForward):
            made = activated(part.activation, made)
        return (made,)


@dataclass(frozen=True)
class ProjectionLayer(Layer):
    """(x,) to (keys and values, queries), of any tokens, or those of a slice's heads; each is memory of its own."""

    part: Attention

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (x,) = inputs
        assert x is not None
        features = F.linear(x, p["attn.c_attn.weight"], p.get("attn.c_attn.bias"))  # one node where parameters enter
        mine = self.part.heads_of(share.of)
        if mine.rope_theta is not None:
            heads, size = mine.heads + mine.kv_heads, mine.width // mine.heads
            features = rotated(features, heads, size, share.tokens or range(x.shape[1]), mine.rope_theta)
        queries, keys_values = torch.split(features, [mine.width, 2 * mine.kv_width], -1)
        return keys_values.clone(), queries.clone()


@dataclass(frozen=True)
class OutputLayer(Layer):
    """(attended,) to (branch,), of any tokens (see `attention.attend`); from a slice's heads, a term of it."""

    part: Attention

    def compute(self, p: dict[str, Tensor], inputs: Tensors, share: Share, dropout: Dropout | None) -> Tensors:
        (attended,) = inputs
        assert attended is not None
        weight = p["attn.c_proj.weight"]
        mixed = attended[..., : self.part.heads_of(share.of).width]
        return (F.linear(mixed.to(weight.dtype), weight),)
