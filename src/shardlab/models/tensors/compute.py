"""The primitives' arithmetic: for each the function that computes it, whole or one rank's share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.errors import UserError
from shardlab.models.attention import Attend, Projection
from shardlab.models.mixture import Combine, Dispatch, ExpertActivate, ExpertLinear, Place, Route
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import Activate, Add, Embed, Linear, Lookup, Norm, Scores
from shardlab.models.tensors import mixture
from shardlab.models.tensors.activations import activated
from shardlab.models.tensors.attention_with_dropout import attention_with_dropout
from shardlab.models.tensors.cache import KeysValues
from shardlab.models.tensors.lookup import look_up, without_padding
from shardlab.models.tensors.rms_norm import rms_norm
from shardlab.models.tensors.rotary import turned
from shardlab.models.tensors.share import Share
from shardlab.models.tensors.tokens import rows_of


@dataclass(slots=True)  # one is made for every primitive, and a frozen one takes three times as long
class Given:
    """What a primitive computes with.

    Attributes:
        parameters: by name; of one slice where they are sliced.
        tensors: those that it reads, by name, rows first.
        share: which slice, or which tokens, these are.
        factor: what it multiplies by beside its parameters (see `factors`).
        cache: of the text's earlier tokens (None: all tokens are given).
    """

    parameters: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    share: Share
    factor: Tensor | None = None
    cache: KeysValues | None = None

    @property
    def x(self) -> Tensor:
        """The tensor that most primitives read."""
        return self.tensors["x"]

    def linear(self, read: str, weight: str, bias: str = "") -> Tensor:
        """A linear map of a tensor by parameters of these names; empty for no bias."""
        parameters = self.parameters
        return F.linear(self.tensors[read], parameters[weight], parameters[bias] if bias else None)


@singledispatch
def compute(primitive: Primitive, given: Given) -> tuple[Tensor, ...]:
    """What a primitive makes, in the order of `primitive.makes`; a new one registers its function here.

    Raises:
        UserError: when none is registered for it.
    """
    kind = type(primitive).__name__
    raise UserError(f"nothing computes {kind} on torch; register a function (primitive: {kind}, given: Given)")


@compute.register
def _(primitive: Lookup, given: Given) -> tuple[Tensor, ...]:
    weight, (number, of) = given.parameters["wte.weight"], given.share.piece("vocab")
    return (F.embedding(given.x, weight) if of == 1 else look_up(weight, given.x, number * len(weight)),)


@compute.register
def _(primitive: Embed, given: Given) -> tuple[Tensor, ...]:
    """A residual stream is memory of its own, which outlives the embedding."""
    x = given.x
    if primitive.positions:
        x = x + rows_of(given.parameters["wpe.weight"], given.share.tokens or range(x.shape[1]))
    if given.factor is not None:
        x = x * given.factor
    return (x.clone() if x is given.x else x,)


@compute.register
def _(primitive: Norm, given: Given) -> tuple[Tensor, ...]:
    s, weight = given.tensors["s"], given.parameters[f"{primitive.name}.weight"]
    if primitive.rms:
        return (rms_norm(s, weight, primitive.eps),)
    return (F.layer_norm(s, s.shape[-1:], weight, given.parameters.get(f"{primitive.name}.bias"), primitive.eps),)


@compute.register
def _(primitive: Linear, given: Given) -> tuple[Tensor, ...]:
    read, name = primitive.read, primitive.name
    x, weight = given.tensors[read], given.parameters[f"{name}.weight"]
    if x.shape[-1] > weight.shape[1]:  # what attention has mixed, as an op of its own, comes with its log-sum-exp
        given = replace(given, tensors={read: x[..., : weight.shape[1]].to(weight.dtype)})
    return (given.linear(read, f"{name}.weight", f"{name}.bias" if primitive.bias else ""),)


@compute.register
def _(primitive: Scores, given: Given) -> tuple[Tensor, ...]:
    logits = given.linear("x", "wte.weight" if primitive.tied else "lm_head.weight")
    return (without_padding(logits, primitive.outputs, given.share),)


@compute.register
def _(primitive: Activate, given: Given) -> tuple[Tensor, ...]:
    return (activated(primitive.activation, given.tensors[primitive.tensor]),)


@compute.register
def _(primitive: Add, given: Given) -> tuple[Tensor, ...]:
    x, s = given.tensors[primitive.branch], given.tensors["s"]
    if primitive.bias:
        x = x + given.parameters[primitive.bias]
    return (s + x if given.factor is None else torch.addcmul(s, x, given.factor),)


@compute.register
def _(primitive: Projection, given: Given) -> tuple[Tensor, ...]:
    """Queries, and keys and values, are views of one tensor."""
    of = given.share.piece("head")[1]
    features = given.linear("x", "attn.c_attn.weight", "attn.c_attn.bias" if primitive.bias else "")
    if given.factor is not None:
        features = turned(features, given.factor, (primitive.heads + primitive.kv_heads) // of)
    queries, keys_values = features.split_with_sizes((primitive.hidden_size // of, 2 * primitive.kv_width // of), -1)
    return queries, keys_values


@compute.register
def _(primitive: Attend, given: Given) -> tuple[Tensor, ...]:
    of, size = given.share.piece("head")[1], primitive.hidden_size // primitive.heads
    heads, kv_heads, queries, kv = (
        primitive.heads // of,
        primitive.kv_heads // of,
        given.tensors["q"],
        given.tensors["kv"],
    )
    rows, tokens, _ = queries.shape
    q = queries.view(rows, tokens, heads, size).transpose(1, 2)  # (rows, heads, T, size)
    if given.cache is not None:
        kv = given.cache.add(kv)
    keys_values = kv.view(rows, -1, 2 * kv_heads, size).transpose(1, 2)
    k, v = keys_values.chunk(2, 1)
    if given.factor is None:
        earlier = kv.shape[1] - tokens
        seen = q.new_ones(tokens, kv.shape[1], dtype=torch.bool).tril(earlier) if earlier > 0 and tokens > 1 else None
        grouped = kv_heads < heads
        mixed = F.scaled_dot_product_attention(q, k, v, seen, is_causal=not earlier, enable_gqa=grouped)
    else:
        if kv_heads < heads:
            q = q.clone()  # autograd then keeps this and not all features
            k, v = (each.repeat_interleave(heads // kv_heads, 1) for each in (k, v))
        mixed = attention_with_dropout(q, k, v, given.factor)
    return (mixed.transpose(1, 2).flatten(2),)


@compute.register
def _(primitive: Route, given: Given) -> tuple[Tensor, ...]:
    return mixture.route(primitive.router, given.parameters["mlp.router.weight"], given.x, given.share)


@compute.register
def _(primitive: Place, given: Given) -> tuple[Tensor, ...]:
    return (mixture.slots_of(primitive.router, given.tensors["choices"], given.share),)


@compute.register
def _(primitive: Dispatch, given: Given) -> tuple[Tensor, ...]:
    return (mixture.dispatch(primitive.router, given.x, given.tensors["slots"], given.share),)


@compute.register
def _(primitive: ExpertLinear, given: Given) -> tuple[Tensor, ...]:
    weight, bias = (given.parameters.get(f"{primitive.name}.{end}") for end in ("weight", "bias"))
    assert weight is not None
    if bias is not None and primitive.in_index == "ffn":
        bias = mixture.padded_bias(bias, given.share)
    return (mixture.expert_linear(given.x, weight, bias),)


@compute.register
def _(primitive: ExpertActivate, given: Given) -> tuple[Tensor, ...]:
    return (activated(primitive.activation, given.x),)


@compute.register
def _(primitive: Combine, given: Given) -> tuple[Tensor, ...]:
    return (mixture.combine(given.x, given.tensors["gates"], given.tensors["slots"]),)
