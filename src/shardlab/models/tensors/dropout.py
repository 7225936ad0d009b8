"""Dropout masks and other factors of primitives that are not parameters.

A mask is a function of the seed, the step, the block, the microbatch and the site, so every strategy drops the same
elements. Factors depend on no other tensor, so they are computed before a layer, and a compiled layer receives them as
inputs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from shardlab.models.attention import Attend, HeadNorm, LatentProjection, Projection
from shardlab.models.primitives import Add, DropoutSite, Embed, Primitive
from shardlab.models.tensors.attention import rotations
from shardlab.models.tensors.share import Share


@dataclass(frozen=True)
class Dropout:
    """Dropout masks of one layer in one step. A microbatch has the same masks on every rank and in every recomputation.

    Attributes:
        probability: probability that an element is dropped; the others are scaled by 1 / (1 - probability).
        seed: seed of the run.
        step: number of the optimizer step.
        layer: number of the layer; in the result of `of_block`, number of the block, which determines the masks.
        microbatches: numbers of the microbatches in the input. Each has an equal number of consecutive rows.
    """

    probability: float
    seed: int
    step: int
    layer: int
    microbatches: tuple[int, ...]

    def of_block(self, block: int) -> Dropout | None:
        """Return the masks of one block of the layer; None if nothing is dropped."""
        return replace(self, layer=block) if self.probability else None

    def mask(
        self, site: DropoutSite, shape: tuple[int, ...], like: Tensor, dim: int = 0, part: Sequence[int] | None = None
    ) -> Tensor:
        """Return a mask of 0 and 1 / (1 - probability).

        Each microbatch's mask is drawn whole, on the CPU, from a separate generator.

        Args:
            site: position in the block.
            shape: shape of the whole mask, rows first.
            like: tensor with the dtype and device of the mask.
            dim: dim that `part` indexes.
            part: indices to return (None: all).
        """
        rows, count = shape[0], len(self.microbatches)
        assert rows % count == 0, f"{rows} rows do not hold {count} microbatches of equal size"
        mask = torch.empty(shape, dtype=torch.bool)
        for microbatch, part_mask in zip(self.microbatches, mask.chunk(count), strict=True):
            generator = make_generator("dropout", self.seed, self.step, self.layer, microbatch, site)
            part_mask.bernoulli_(1 - self.probability, generator=generator)
        if part is not None:
            mask = mask.index_select(dim, torch.tensor(part))
        return mask.to(like.device, like.dtype).mul_(1 / (1 - self.probability))


def make_generator(purpose: str, *numbers: int) -> torch.Generator:
    """Return a CPU generator that is seeded by the purpose and the numbers.

    Both are hashed, because torch's CPU generator uses only 32 bits of its seed, and because the streams of adjacent
    seeds should be unrelated.
    """
    digest = hashlib.blake2b(repr((purpose, *numbers)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


@dataclass(frozen=True)
class FactorInputs:
    """Inputs of a factor.

    Attributes:
        rows: number of sequences.
        length: tokens of each sequence on this rank.
        share: the share of the layer that is computed.
        dropout: the masks of the primitive's block (None: nothing is dropped).
        like: any tensor with the dtype and the device that the factor shall have.
    """

    rows: int
    length: int
    share: Share
    dropout: Dropout | None
    like: Tensor

    def tokens(self, primitive: Primitive) -> int:
        """Return the number of tokens of a whole sequence, of which this rank may have only some."""
        return self.length if self.share.tokens is None else primitive.tokens


@singledispatch
def make_factor(primitive: Primitive, inputs: FactorInputs) -> Tensor | None:
    """Return a primitive's factor that is not a parameter; None for most primitives.

    A new primitive that draws a mask registers its function here.
    """
    return None


@make_factor.register
def _(primitive: Embed, inputs: FactorInputs) -> Tensor | None:
    return _of_tokens(primitive, DropoutSite.EMBEDDING, inputs)


@make_factor.register
def _(primitive: Add, inputs: FactorInputs) -> Tensor | None:
    return _of_tokens(primitive, primitive.site, inputs)


@make_factor.register
def _(primitive: Attend, inputs: FactorInputs) -> Tensor | None:
    """Return the mask of this piece's heads, cut out of the mask of all heads."""
    if inputs.dropout is None:
        return None
    number, of = inputs.share.piece("head")
    heads, tokens = primitive.heads // of, inputs.tokens(primitive)
    whole, positions = (inputs.rows, primitive.heads, tokens, tokens), range(number * heads, (number + 1) * heads)
    return inputs.dropout.mask(DropoutSite.ATTENTION, whole, inputs.like, 1, positions)


@make_factor.register(Projection)
@make_factor.register(HeadNorm)
@make_factor.register(LatentProjection)
def _(primitive: Projection | HeadNorm | LatentProjection, inputs: FactorInputs) -> Tensor | None:
    """Return the rotations of this rank's tokens."""
    if primitive.rope_theta is None:
        return None
    latent = isinstance(primitive, LatentProjection)
    tokens, size = inputs.share.tokens, primitive.sizes.rope_dim if latent else primitive.head_dim
    positions = range(inputs.length) if tokens is None else tokens if isinstance(tokens, range) else tuple(tokens)
    exact = torch.promote_types(inputs.like.dtype, torch.float32)
    return rotations(primitive.rope_theta, primitive.rope_scaling, size, positions, exact, inputs.like.device)


def _of_tokens(primitive: Add | Embed, site: DropoutSite, inputs: FactorInputs) -> Tensor | None:
    """Return the mask of this rank's tokens, cut out of the mask of the whole sequence."""
    if inputs.dropout is None:
        return None
    whole = (inputs.rows, inputs.tokens(primitive), primitive.hidden_size)
    return inputs.dropout.mask(site, whole, inputs.like, 1, inputs.share.tokens)
