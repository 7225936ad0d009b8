"""The primitives' arithmetic: for each the function that computes it, whole or one rank's share."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import singledispatch
from statistics import median
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.models.attention import Attend, Projection
from shardlab.models.mixture import Combine, Dispatch, ExpertActivate, ExpertLinear, Place, Route
from shardlab.models.primitives import LARGE, Activate, Activation, Add, Embed, Linear, Lookup, Norm, Primitive, Scores
from shardlab.models.tensors import mixture
from shardlab.models.tensors.attention import KeysValues, attention_with_dropout, rows_of, turned
from shardlab.models.tensors.share import Share


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


# What lies between the two linear maps of an MLP.


def activated(activation: Activation, x: Tensor) -> Tensor:
    """Features of the first map (..., features) to those that the second one takes, (..., hidden)."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "squared_relu":
        return F.relu(x).square()
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


# Root mean square layer normalisation.


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if x.is_cuda:  # where torch has a fused kernel
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return scaled(x, eps)[0] * weight


def scaled(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x / sqrt(mean(x^2) + eps), and what x is multiplied by, (..., 1); computed in float32 at least."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype), scale.to(x.dtype)


# One slice of the vocabulary: its embedding, and its scores.


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """The embeddings (rows, T, C) of tokens (rows, T) in a slice's `weight`, which begins at token `first`.

    Tokens of other slices give zero, so that the sum over slices is the whole look-up (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).
    """
    indices, elsewhere = indices_in(tokens, first, len(weight))
    return F.embedding(indices, weight).masked_fill(elsewhere[..., None], 0)


def indices_in(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Find each token's index in the slice of `count` tokens from `first` (0 for others), and whether it is another."""
    elsewhere = (tokens < first) | (tokens >= first + count)
    return (tokens - first).masked_fill(elsewhere, 0), elsewhere


def without_padding(logits: Tensor, tokens: int, share: Share) -> Tensor:
    """Set a slice's scores (..., tokens of the slice) to -inf in place, beyond a vocabulary of so many tokens."""
    each = logits.shape[-1]
    real = max(0, tokens - share.piece("vocab")[0] * each)
    if real < each:
        logits[..., real:].fill_(float("-inf"))
    return logits


# Products with large weights by oneDNN or by torch's own kernels, whichever is faster for a shape on this machine.
#
# Torch's own linear maps call MKL in float32 on x86, and torch has oneDNN beside it. Which of them takes less time
# depends on the CPU, the shape and the direction, so `measured` times both, and `CHOICES` says which one computes.
# Before anything is chosen, torch's own kernels compute. `shardlab.execute.kernel_choice` makes all ranks choose
# alike. `benchmarks/products.py` has both kernels side by side. Layers that torch.compile compiles do not come here.


AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both."""

GAIN = 0.97
"""Part of the time of torch's own kernel that oneDNN's may take at most to be chosen: less would be noise."""

BUDGET = 0.03
"""Seconds after which no more turns of a product are timed."""

TURNS = range(3, 51)
"""Fewest and, before the end, most turns that are timed."""


class Product(NamedTuple):
    """Shape of a product with a weight (outputs, inputs).

    Attributes:
        rows: of the matrix that is multiplied.
        inputs, outputs: features that the linear map reads and makes.
        bias: whether a bias is added.
        backward: whether it is the gradient of what the map read, and not the map.
    """

    rows: int
    inputs: int
    outputs: int
    bias: bool
    backward: bool


CHOICES: dict[Product, bool | None] = {}
"""Whether oneDNN computes a product; None: it has come up, and nothing is chosen yet."""


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd does not go through it.
    """
    return onednn_linear(x, weight, bias) if _chosen(x, weight, bias is not None, False) else F.linear(x, weight, bias)


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """Compute the gradient of what a linear map read, of that of what it made."""
    return onednn_linear(gradient, weight.T) if _chosen(gradient, weight, False, True) else gradient @ weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear map by oneDNN, in float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def choices(chosen: Mapping[Product, bool]) -> Generator[None, None, None]:
    """Compute by these choices within this, and by those that are made within it, but by no others."""
    before = CHOICES.copy()
    CHOICES.clear()
    CHOICES.update(chosen)
    try:
        yield
    finally:
        CHOICES.clear()
        CHOICES.update(before)


def measured(product: Product) -> bool:
    """Return whether oneDNN takes less time for a product than torch's own kernel, by the median of some turns."""
    if not AVAILABLE or not torch.backends.mkldnn.enabled:
        return False
    turns = timed(product, TURNS, BUDGET)
    return median(onednn / own for onednn, own in turns) < GAIN


def timed(product: Product, turns: range, budget: float) -> list[tuple[float, float]]:
    """Time a product by both kernels in turns, which begin with either.

    Args:
        product: its shape.
        turns: fewest and, before the end, most turns.
        budget: seconds after which no more turns begin.

    Returns:
        Seconds for which this thread had a core, in oneDNN's and in torch's own kernel, of each turn. What else the
        machine does takes other seconds, and threads that compute together meet at the end of a product.
    """
    rows, inputs, outputs, has_bias, backward = product
    weight, bias = torch.ones(outputs, inputs), torch.ones(outputs) if has_bias else None
    x = torch.ones(rows, outputs if backward else inputs)

    def seconds(onednn: bool) -> float:
        began = time.thread_time()
        if onednn:
            onednn_linear(x, weight.T if backward else weight, bias)
        elif backward:
            torch.matmul(x, weight)
        else:
            F.linear(x, weight, bias)
        return time.thread_time() - began

    for onednn in (True, False):
        seconds(onednn)  # the first call prepares the kernel
    found: list[tuple[float, float]] = []
    until = time.perf_counter() + budget
    while len(found) < turns.start or (len(found) < turns.stop - 1 and time.perf_counter() < until):
        first = len(found) % 2 == 0
        took = {onednn: seconds(onednn) for onednn in (first, not first)}
        found.append((took[True], took[False]))
    return found


def _chosen(x: Tensor, weight: Tensor, bias: bool, backward: bool) -> bool:
    """Return whether oneDNN computes a product; of a large one in float32 on a CPU, note that it has come up."""
    if weight.numel() < LARGE or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    outputs, inputs = weight.shape
    product = Product(x.numel() // x.shape[-1], inputs, outputs, bias, backward)
    onednn = CHOICES.setdefault(product, None)
    return bool(onednn and AVAILABLE and torch.backends.mkldnn.enabled)


# Cross-entropy, whole or over slices of the vocabulary.
#
# Each slice reduces its logits to three numbers a token: their maximum, the sum of exp(logit - maximum), and the
# target's logit. From these numbers of all slices together follow the loss, and each slice's own gradient
# (Megatron-LM's vocabulary-parallel cross-entropy; Shoeybi et al. 2019, arXiv 1909.08053, section 3). Targets of -1
# do not count. All numbers are float32 at least.


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens; logits (rows, T, vocabulary), targets (rows, T), -1: not counted."""
    logits = _exact(logits).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


def loss_stats(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """What the loss needs of one slice: (rows, T, 3) with maximum, sum of exp(logit - maximum), target's logit.

    The last is 0 where the target lies in another slice, so that it can be summed over slices. A slice of padding
    alone (every logit -inf) gives (-inf, 0, 0).

    Args:
        logits: (rows, T, tokens of the slice); -inf for padding.
        targets: (rows, T) in the whole vocabulary.
        first: the slice's first token.
    """
    logits = _exact(logits.detach())
    maximum = logits.amax(-1)
    shift = maximum.masked_fill(maximum.isneginf(), 0)
    total = (logits - shift[..., None]).exp_().sum(-1)
    indices, elsewhere = indices_in(targets, first, logits.shape[-1])
    target = logits.gather(-1, indices[..., None])[..., 0].masked_fill(elsewhere, 0)
    return torch.stack([maximum, total, target], -1)


def combined_loss(stats: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over tokens, from all slices' `loss_stats` (slices, rows, T, 3)."""
    maximum, total = _combined(stats)
    losses = total.log() + maximum - stats[..., 2].sum(0)
    return losses.masked_fill(targets == -1, 0).sum()


def loss_gradient(logits: Tensor, stats: Tensor, targets: Tensor, first: int, weight: float | Tensor = 1.0) -> Tensor:
    """The gradient of `combined_loss` with respect to one slice's logits: softmax less 1 at the target.

    Args:
        logits, targets, first: as for `loss_stats`; the gradient has the logits' shape and dtype.
        stats: of all slices, (slices, rows, T, 3).
        weight: of the loss; it is multiplied before anything is rounded.
    """
    maximum, total = _combined(stats)
    gradient = (_exact(logits.detach()) - maximum[..., None]).exp_().div_(total[..., None])
    indices, elsewhere = indices_in(targets, first, logits.shape[-1])
    gradient.scatter_add_(-1, indices[..., None], (elsewhere.to(gradient.dtype) - 1)[..., None])
    return gradient.masked_fill_((targets == -1)[..., None], 0).mul_(weight).to(logits.dtype)


def _combined(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Maximum over all slices, and the sum of exp(logit - maximum)."""
    maximum = stats[..., 0].amax(0)
    return maximum, (stats[..., 1] * (stats[..., 0] - maximum).exp()).sum(0)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


# Auxiliary losses: what a primitive of yours adds to the model's loss.


def with_auxiliary_loss(x: Tensor, loss: Tensor, share: Share) -> Tensor:
    """Return `x`, whose backward pass also takes a loss back (as Megatron-LM's MoEAuxLossAutoScaler).

    A primitive that calls it says `affine`. The reported loss does not have the auxiliary one in it.

    Args:
        x: a tensor that the primitive makes.
        loss: (), the sum over the microbatches that are here; the step's mean over microbatches is added to its loss.
        share: the primitive's.
    """
    return cast(Tensor, _WithLoss.apply(x, loss, share))


class _WithLoss(torch.autograd.Function):
    """The first of two tensors; the second one's gradient is what the gradients of the pass are multiplied by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.like = share, loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.like * (ctx.share.gradient_scale / ctx.share.of_step), None
