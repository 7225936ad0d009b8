"""Dropout whose masks depend on what is dropped, not on who computes it or how often."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
from torch import Tensor

from shardlab.models.attention import Attend, Projection
from shardlab.models.primitives import Add, DropoutSite, Embed, Primitive
from shardlab.models.tensors.attention import turns
from shardlab.models.tensors.share import Share


@dataclass(frozen=True)
class Dropout:
    """The masks of one layer in one step. A microbatch has the same ones wherever and however often it is computed.

    Attributes:
        probability: that an element is dropped; the others are scaled by 1 / (1 - probability).
        seed: of the run.
        step: the optimizer step.
        layer: the layer's number.
        microbatches: which of them the input's rows are, in order, with equally many rows each.
    """

    probability: float
    seed: int
    step: int
    layer: int
    microbatches: tuple[int, ...]

    def of_block(self, block: int) -> Dropout | None:
        """The masks of a block, which may be one of several in a layer; None if nothing is dropped."""
        return replace(self, layer=block) if self.probability else None

    def mask(
        self, site: DropoutSite, shape: tuple[int, ...], like: Tensor, dim: int = 0, part: Sequence[int] | None = None
    ) -> Tensor:
        """What to multiply with: 0 or 1 / (1 - probability), of `shape` (rows first), as `like` in dtype and device.

        Each microbatch's mask is drawn whole, on the CPU, from a generator of its own; of dim `dim` only `part` is
        given.
        """
        rows, count = shape[0], len(self.microbatches)
        assert rows % count == 0, f"{rows} rows do not hold {count} microbatches of equal size"
        kept = torch.empty(shape, dtype=torch.bool)
        for microbatch, drawn in zip(self.microbatches, kept.chunk(count), strict=True):
            generator = generator_of("dropout", self.seed, self.step, self.layer, microbatch, site)
            drawn.bernoulli_(1 - self.probability, generator=generator)
        if part is not None:
            kept = kept.index_select(dim, torch.tensor(part))
        return kept.to(like.device, like.dtype).mul_(1 / (1 - self.probability))


# Random numbers that are a function of what they are for, so that every strategy draws the same.


def generator_of(purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator that depends on the purpose and the numbers alone, and on each of them.

    Hashed, since torch's CPU generator uses 32 bits of its seed, and neighbouring seeds should have nothing in common.
    """
    digest = hashlib.blake2b(repr((purpose, *numbers)).encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


# What primitives multiply by beside their parameters: dropout masks, and the angles of rotary positions.
#
# They depend on no other tensor, so they are made before a layer is computed, and a compiled layer is given them.


@dataclass(frozen=True)
class Surroundings:
    """What a factor depends on.

    Attributes:
        rows, length: of the layer's inputs (rows, tokens that are here, ...).
        share: which share of the layer is computed.
        dropout: the masks of the primitive's block (None: nothing is dropped).
        like: has the factor's dtype and device.
    """

    rows: int
    length: int
    share: Share
    dropout: Dropout | None
    like: Tensor

    def tokens(self, primitive: Primitive) -> int:
        """Tokens of a whole sequence."""
        return self.length if self.share.tokens is None else primitive.tokens


@singledispatch
def factor(primitive: Primitive, around: Surroundings) -> Tensor | None:
    """What a primitive multiplies by; nothing for most. A new one that draws a mask registers its function here."""
    return None


@factor.register
def _(primitive: Embed, around: Surroundings) -> Tensor | None:
    return _of_tokens(primitive, DropoutSite.EMBEDDING, around)


@factor.register
def _(primitive: Add, around: Surroundings) -> Tensor | None:
    return _of_tokens(primitive, primitive.site, around)


@factor.register
def _(primitive: Attend, around: Surroundings) -> Tensor | None:
    """The mask of these heads' scores, drawn for all heads."""
    if around.dropout is None:
        return None
    number, of = around.share.piece("head")
    heads, tokens = primitive.heads // of, around.tokens(primitive)
    whole, here = (around.rows, primitive.heads, tokens, tokens), range(number * heads, (number + 1) * heads)
    return around.dropout.mask(DropoutSite.ATTENTION, whole, around.like, 1, here)


@factor.register
def _(primitive: Projection, around: Surroundings) -> Tensor | None:
    """The turns of the tokens that are here."""
    if primitive.rope_theta is None:
        return None
    tokens, size = around.share.tokens, primitive.hidden_size // primitive.heads
    here = range(around.length) if tokens is None else tokens if isinstance(tokens, range) else tuple(tokens)
    exact = torch.promote_types(around.like.dtype, torch.float32)
    return turns(primitive.rope_theta, primitive.rope_scaling, size, here, exact, around.like.device)


def _of_tokens(primitive: Add | Embed, site: DropoutSite, around: Surroundings) -> Tensor | None:
    """The mask of the tokens that are here, drawn for the whole sequence."""
    if around.dropout is None:
        return None
    whole = (around.rows, around.tokens(primitive), primitive.hidden_size)
    return around.dropout.mask(site, whole, around.like, 1, around.share.tokens)
