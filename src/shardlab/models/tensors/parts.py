"""The parts' arithmetic: for every part of a model the function that computes it, whole or one slice's share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.mixture import Mixture
from shardlab.models.parts import Attention, Embedding, FeedForward, Head, Part
from shardlab.models.tensors.activations import activated
from shardlab.models.tensors.dropout import Dropout, Site
from shardlab.models.tensors.lookup import look_up
from shardlab.models.tensors.rms_norm import rms_norm
from shardlab.models.tensors.rotary import rotated
from shardlab.models.tensors.tokens import rows_of

Parameters = Mapping[str, Tensor]

SITES: dict[type[Part], Site] = {
    Embedding: Site.EMBEDDING,
    Attention: Site.ATTENTION_OUTPUT,
    FeedForward: Site.FEED_FORWARD_OUTPUT,
    Mixture: Site.FEED_FORWARD_OUTPUT,
}
"""Where each part's result is dropped."""


@dataclass(frozen=True)
class Share:
    """Which share of a layer, and of a step, is computed.

    Attributes:
        slice, of: of a body, the slice of its parameters, and how many there are.
        tokens: of a norm or a projection, the tokens of the sequence, ascending (None: all).
        microbatches: how many the input's rows are, with equally many rows each; each is routed by itself.
        of_step: how many the step has; each has an equal share of the tokens that are routed.
    """

    slice: int = 0
    of: int = 1
    tokens: Sequence[int] | None = None
    microbatches: int = 1
    of_step: int = 1


ALL = Share()
"""The whole layer."""


def compute(part: Part, p: Parameters, x: Tensor, dropout: Dropout | None, share: Share = ALL) -> Tensor:
    """A whole part: norm, body, and sum with the residual stream, as far as it has them; `p` by name."""
    if isinstance(part, Embedding):
        return add_branch(part, p, None, body_of(part, p, x, share, dropout), share, dropout)
    if isinstance(part, Head):
        return body_of(part, p, norm_of(part, p, x), share, dropout)
    branch = body_of(part, p, norm_of(part, p, x), share, dropout)  # with its last bias, which lies in `p`
    return x + branch if dropout is None else torch.addcmul(x, branch, dropout.mask(SITES[type(part)], x.shape, x))


def norm_of(part: Part, p: Parameters, x: Tensor) -> Tensor:
    """The norm that a part begins with."""
    weight = p[f"{part.norm_name}.weight"]
    return rms_norm(x, weight) if part.rms else F.layer_norm(x, x.shape[-1:], weight, p.get(f"{part.norm_name}.bias"))


def add_branch(
    part: Part, p: Parameters, residual: Tensor | None, branch: Tensor, share: Share, dropout: Dropout | None
) -> Tensor:
    """What follows a part's body, for the share's tokens: its last bias (or the positions), dropout, the residual.

    Args:
        residual, branch: (rows, tokens of the share, C).
    """
    tokens = share.tokens or range(branch.shape[1])
    assert len(tokens) == branch.shape[1], f"{tokens} are not the {branch.shape[1]} tokens given"
    if part.added in p:
        added = p[part.added]
        branch = branch + (rows_of(added, tokens) if isinstance(part, Embedding) else added)
    if dropout is None:
        return branch if residual is None else residual + branch
    whole = (len(branch), part.block, part.width)
    mask = dropout.mask(SITES[type(part)], whole, branch, 1, tokens)
    return branch * mask if residual is None else torch.addcmul(residual, branch, mask)


@singledispatch
def body_of(part: Part, p: Parameters, x: Tensor, share: Share, dropout: Dropout | None) -> Tensor:
    """A part's body, from tokens (rows, T) or normalised features (rows, T, C)."""
    raise NotImplementedError(f"no arithmetic for {type(part).__name__}")


@body_of.register
def _(part: Embedding, p: Parameters, x: Tensor, share: Share, dropout: Dropout | None) -> Tensor:
    weight = p["wte.weight"]
    return F.embedding(x, weight) if share.of == 1 else look_up(weight, x, share.slice * len(weight))


@body_of.register
def _(part: Attention, p: Parameters, x: Tensor, share: Share, dropout: Dropout | None) -> Tensor:
    rows, tokens, _ = x.shape
    heads, kv_heads, size = part.heads // share.of, part.kv_heads // share.of, part.width // part.heads
    features = _linear(p, "attn.c_attn", x)
    if part.rope_theta is not None:
        features = rotated(features, heads + kv_heads, size, range(tokens), part.rope_theta)
    features = features.view(rows, tokens, heads + 2 * kv_heads, size).transpose(1, 2)
    q, k, v = features[:, :heads], features[:, heads:-kv_heads], features[:, -kv_heads:]  # (rows, heads, T, size)
    if dropout is None:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=kv_heads < heads)
    else:
        if kv_heads < heads:
            q = q.clone()  # autograd then keeps this and not all features
            k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        mine = range(share.slice * heads, (share.slice + 1) * heads)
        mask = dropout.mask(Site.ATTENTION, (rows, part.heads, tokens, tokens), q, 1, mine)
        mixed = _attention_with_dropout(q, k, v, mask)
    return _linear(p, "attn.c_proj", mixed.transpose(1, 2).reshape(rows, tokens, heads * size))


@body_of.register
def _(part: FeedForward, p: Parameters, x: Tensor, share: Share, dropout: Dropout | None) -> Tensor:
    return _linear(p, "mlp.c_proj", activated(part.activation, _linear(p, "mlp.c_fc", x)))


@body_of.register
def _(part: Head, p: Parameters, x: Tensor, share: Share, dropout: Dropout | None) -> Tensor:
    weight = p["wte.weight" if part.tied else "lm_head.weight"]
    logits = F.linear(x, weight)
    real = max(0, part.vocabulary - share.slice * len(weight))
    if real < len(weight):
        logits[..., real:].fill_(float("-inf"))
    return logits


def _attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention step by step, since the fused op draws masks of its own; shapes (rows, heads, T, size)."""
    rows, heads, tokens, size = q.shape
    future = q.new_full((tokens, tokens), float("-inf")).triu_(1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=size**-0.5)
    return torch.bmm(scores.softmax(-1) * mask.flatten(0, 1), v).view(rows, heads, tokens, size)


def _linear(p: Parameters, name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))
