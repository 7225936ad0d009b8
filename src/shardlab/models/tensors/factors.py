"""What primitives multiply by beside their parameters: dropout masks, and the angles of rotary positions.

They depend on no other tensor, so they are made before a layer is computed, and a compiled layer is given them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import singledispatch

import torch
from torch import Tensor

from shardlab.models.attention import Attend, Projection
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import Add, DropoutSite, Embed
from shardlab.models.tensors.dropout import Dropout
from shardlab.models.tensors.rotary import turns
from shardlab.models.tensors.share import Share


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
