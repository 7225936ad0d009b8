"""The layers' arithmetic: for every part of a model the function that computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.model import Model
from shardlab.models.parts import Attention, Embedding, FeedForward, Head, Part
from shardlab.models.tensors.dropout import Dropout, Site


@dataclass(frozen=True)
class Layer:
    """One layer of a model, a function of its parameters and its input; it holds no tensor itself."""

    names: tuple[str, ...]
    parts: tuple[Part, ...]

    def __call__(self, parameters: Sequence[Tensor], x: Tensor, dropout: Dropout | None = None) -> Tensor:
        """Activation l, (rows, *shape), to activation l + 1; `parameters` in the layout's order."""
        named = dict(zip(self.names, parameters, strict=True))
        if dropout is not None and dropout.probability == 0:
            dropout = None
        for part in self.parts:
            x = compute(part, named, x, dropout)
        return x


def layers_of(model: Model) -> list[Layer]:
    """The model's layers, in order."""
    names = [tuple(p.name for p in model.layout(layer).parameters) for layer in range(model.layers)]
    return [Layer(names[layer], model.parts(layer)) for layer in range(model.layers)]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens; logits (rows, T, vocabulary), targets (rows, T), -1: not counted."""
    logits = logits.flatten(0, -2)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


@singledispatch
def compute(part: Part, p: Mapping[str, Tensor], x: Tensor, dropout: Dropout | None) -> Tensor:
    """What a part makes of its input (rows, T) or (rows, T, C), with the layer's parameters by name."""
    raise NotImplementedError(f"no arithmetic for {type(part).__name__}")


@compute.register
def _(part: Embedding, p: Mapping[str, Tensor], x: Tensor, dropout: Dropout | None) -> Tensor:
    tokens = x.shape[1]  # fewer than the block while text is generated
    x = F.embedding(x, p["wte.weight"])
    if part.positions:
        x = x + p["wpe.weight"][:tokens]
    return x if dropout is None else x * dropout.mask(Site.EMBEDDING, x.shape, x)


@compute.register
def _(part: Attention, p: Mapping[str, Tensor], x: Tensor, dropout: Dropout | None) -> Tensor:
    rows, tokens, width = x.shape
    features = _linear(p, "attn.c_attn", _norm(p, "ln_1", x)).view(rows, tokens, 3, part.heads, width // part.heads)
    q, k, v = (each.transpose(1, 2) for each in features.unbind(2))  # (rows, heads, T, C / heads)
    if dropout is None:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    else:
        mixed = _attention_with_dropout(q, k, v, dropout)
    mixed = mixed.transpose(1, 2).reshape(rows, tokens, width)
    return _residual(x, _linear(p, "attn.c_proj", mixed), dropout, Site.ATTENTION_OUTPUT)


@compute.register
def _(part: FeedForward, p: Mapping[str, Tensor], x: Tensor, dropout: Dropout | None) -> Tensor:
    hidden = F.gelu(_linear(p, "mlp.c_fc", _norm(p, "ln_2", x)))
    return _residual(x, _linear(p, "mlp.c_proj", hidden), dropout, Site.FEED_FORWARD_OUTPUT)


@compute.register
def _(part: Head, p: Mapping[str, Tensor], x: Tensor, dropout: Dropout | None) -> Tensor:
    return F.linear(_norm(p, "ln_f", x), p["wte.weight" if part.tied else "lm_head.weight"])


def _attention_with_dropout(q: Tensor, k: Tensor, v: Tensor, dropout: Dropout) -> Tensor:
    """Attention step by step, since the fused op draws masks of its own; shapes (rows, heads, T, C / heads)."""
    rows, heads, tokens, features = q.shape
    mask = dropout.mask(Site.ATTENTION, (rows, heads, tokens, tokens), q).flatten(0, 1)
    future = q.new_full((tokens, tokens), float("-inf")).triu_(1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=features**-0.5)
    return torch.bmm(scores.softmax(-1) * mask, v).view(rows, heads, tokens, features)


def _norm(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p.get(f"{name}.bias"))


def _linear(p: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _residual(x: Tensor, branch: Tensor, dropout: Dropout | None, site: Site) -> Tensor:
    """The residual stream with what a branch adds to it."""
    return x + branch if dropout is None else torch.addcmul(x, branch, dropout.mask(site, x.shape, x))
