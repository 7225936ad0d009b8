"""Definition of each primitive: the function that computes it, whole or for one rank's share.

- `compute` dispatches on the primitive. All other implementations are tested against the functions registered there.
- `linear_forward` and `linear_backward` are products with large weights, by oneDNN or by torch's default kernels,
  whichever is faster. Torch calls MKL in float32 on x86; the faster library depends on the CPU, the shape and the
  direction. `is_onednn_faster` times both, and `KERNEL_CHOICES` has the results. A product without a choice uses
  torch's kernels. `shardlab.execute.kernel_choice` gives all ranks the same choices, and `benchmarks/products.py`
  compares both kernels. Compiled layers do not use these functions.
- `cross_entropy` is the loss. Over slices of the vocabulary it is `loss_stats` with `combine_loss` and `loss_gradient`:
  each slice reduces its logits to three numbers a token (their maximum, the sum of exp(logit - maximum), and the
  target's logit), and these numbers of all slices determine the loss and each slice's gradient (Megatron-LM's
  vocabulary-parallel cross-entropy; Shoeybi et al. 2019, arXiv 1909.08053, section 3). Targets of -1 do not count. All
  numbers are in float32 or float64.
- `with_auxiliary_loss` is for primitives that add another loss, such as load balancing.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
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
from shardlab.models.attention import Attend, HeadNorm, LatentProjection, Latents, Projection
from shardlab.models.mixture import Combine, Dispatch, ExpertActivate, ExpertLinear, Place, Route
from shardlab.models.primitives import LARGE, Activate, Activation, Add, Embed, Linear, Lookup, Norm, Primitive, Scores
from shardlab.models.tensors import mixture
from shardlab.models.tensors.attention import KeyValueCache, attention_with_dropout, rotate, select_rows
from shardlab.models.tensors.share import Share


@dataclass(slots=True)  # not frozen: one is created for every primitive, and freezing would triple the time
class Operands:
    """Operands of a primitive.

    Attributes:
        parameters: the primitive's parameters by name; those of one slice if the layer is sliced.
        tensors: the input tensors by name, rows first.
        share: the slice of the layer, or the tokens, to which the operands belong.
        factor: the primitive's factor that is not a parameter, such as a dropout mask (see `dropout.make_factor`).
        cache: keys and values of the text's earlier tokens (None: the operands have all tokens).
    """

    parameters: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    share: Share
    factor: Tensor | None = None
    cache: KeyValueCache | None = None

    @property
    def x(self) -> Tensor:
        """The tensor `x`, which most primitives read."""
        return self.tensors["x"]

    def linear(self, read: str, weight: str, bias: str = "") -> Tensor:
        """Apply a linear map to a tensor, by the names of the tensor and of the parameters ("": no bias)."""
        parameters = self.parameters
        return F.linear(self.tensors[read], parameters[weight], parameters[bias] if bias else None)


@singledispatch
def compute(primitive: Primitive, operands: Operands) -> tuple[Tensor, ...]:
    """Compute the results of a primitive, in the order of `primitive.makes`.

    A new primitive registers its function here.

    Raises:
        UserError: if no function is registered for the primitive.
    """
    kind = type(primitive).__name__
    raise UserError(f"nothing computes {kind} on torch; register a function (primitive: {kind}, operands: Operands)")


@compute.register
def _(primitive: Lookup, operands: Operands) -> tuple[Tensor, ...]:
    weight, (number, of) = operands.parameters["wte.weight"], operands.share.piece("vocab")
    return (F.embedding(operands.x, weight) if of == 1 else look_up(weight, operands.x, number * len(weight)),)


@compute.register
def _(primitive: Embed, operands: Operands) -> tuple[Tensor, ...]:
    """The residual stream has separate memory, because it outlives the embedding."""
    x = operands.x
    if primitive.positions:
        x = x + select_rows(operands.parameters["wpe.weight"], operands.share.tokens or range(x.shape[1]))
    if operands.factor is not None:
        x = x * operands.factor
    return (x.clone() if x is operands.x else x,)


@compute.register
def _(primitive: Norm, operands: Operands) -> tuple[Tensor, ...]:
    s, weight = operands.tensors["s"], operands.parameters[f"{primitive.name}.weight"]
    if primitive.rms:
        return (rms_norm(s, weight, primitive.eps),)
    return (F.layer_norm(s, s.shape[-1:], weight, operands.parameters.get(f"{primitive.name}.bias"), primitive.eps),)


@compute.register
def _(primitive: Linear, operands: Operands) -> tuple[Tensor, ...]:
    read, name = primitive.read, primitive.name
    x, weight = operands.tensors[read], operands.parameters[f"{name}.weight"]
    if x.shape[-1] > weight.shape[1]:  # the output of attention as an op of its own, with its log-sum-exp
        operands = replace(operands, tensors={read: x[..., : weight.shape[1]].to(weight.dtype)})
    return (operands.linear(read, f"{name}.weight", f"{name}.bias" if primitive.bias else ""),)


@compute.register
def _(primitive: Scores, operands: Operands) -> tuple[Tensor, ...]:
    logits = operands.linear("x", "wte.weight" if primitive.tied else "lm_head.weight")
    return (mask_padding(logits, primitive.outputs, operands.share),)


@compute.register
def _(primitive: Activate, operands: Operands) -> tuple[Tensor, ...]:
    return (activate(primitive.activation, operands.tensors[primitive.tensor]),)


@compute.register
def _(primitive: Add, operands: Operands) -> tuple[Tensor, ...]:
    x, s = operands.tensors[primitive.branch], operands.tensors["s"]
    if primitive.bias:
        x = x + operands.parameters[primitive.bias]
    return (s + x if operands.factor is None else torch.addcmul(s, x, operands.factor),)


@compute.register
def _(primitive: Projection, operands: Operands) -> tuple[Tensor, ...]:
    """One product computes one tensor, of which `q` and `kv` are views."""
    of = operands.share.piece("head")[1]
    features = operands.linear("x", "attn.c_attn.weight", "attn.c_attn.bias" if primitive.bias else "")
    if operands.factor is not None:
        features = rotate(features, operands.factor, (primitive.heads + primitive.kv_heads) // of)
    queries, keys_values = features.split_with_sizes((primitive.width // of, 2 * primitive.kv_width // of), -1)
    return queries, keys_values


@compute.register
def _(primitive: Latents, operands: Operands) -> tuple[Tensor, ...]:
    sizes, x = primitive.sizes, operands.x
    projected = F.linear(x, operands.parameters["attn.latents.weight"])
    parts = projected.split_with_sizes((*sizes.normed, sizes.rope_dim), -1)
    latents = [
        rms_normalize(part, primitive.eps)[0] * operands.parameters[name]
        for name, part in zip(sizes.names, parts[:-1], strict=True)
    ]
    return (torch.cat([*([x] if sizes.q_rank is None else []), *latents, parts[-1]], -1),)


@compute.register
def _(primitive: LatentProjection, operands: Operands) -> tuple[Tensor, ...]:
    """The rotated features of a head come first, so that `rotate` can treat them as narrower heads."""
    sizes, parameters = primitive.sizes, operands.parameters
    heads, turns = sizes.heads // operands.share.piece("head")[1], operands.factor
    assert turns is not None, "rotary positions have angles"
    inputs, latent, shared = operands.x.split_with_sizes((sizes.q_inputs, sizes.kv_rank, sizes.rope_dim), -1)
    q = F.linear(inputs, parameters["attn.latent_q.weight"]).unflatten(-1, (heads, -1))
    rotated, plain = q.split_with_sizes((sizes.rope_dim, sizes.nope_dim), -1)
    rotated = rotate(rotated.flatten(-2), turns, heads).unflatten(-1, (heads, -1))
    projected = F.linear(latent, parameters["attn.latent_kv.weight"])
    keys, values = projected.split_with_sizes((heads * sizes.nope_dim, heads * sizes.value_dim), -1)
    key = rotate(shared, turns, 1).unsqueeze(-2).expand(*shared.shape[:-1], heads, sizes.rope_dim)
    keys = torch.cat([key, keys.unflatten(-1, (heads, -1))], -1)
    return torch.cat([rotated, plain], -1).flatten(-2), torch.cat([keys.flatten(-2), values], -1)


@compute.register
def _(primitive: HeadNorm, operands: Operands) -> tuple[Tensor, ...]:
    """The results are views of one tensor."""
    of = operands.share.piece("head")[1]
    together = torch.cat([operands.tensors["q"], operands.tensors["kv"]], -1)
    weight = torch.cat([operands.parameters[f"attn.{name}_norm.weight"] for name in "qk"])
    normed = (primitive.heads + primitive.kv_heads) // of
    heads: Tensor = together.unflatten(-1, (-1, primitive.head_dim))
    scaled: Tensor = rms_normalize(heads.narrow(-2, 0, normed), primitive.eps)[0] * weight.view(normed, -1)
    features = torch.cat([scaled, heads[..., normed:, :]], -2).flatten(-2)
    if operands.factor is not None:
        features = rotate(features, operands.factor, normed)
    queries, keys_values = features.split_with_sizes((primitive.width // of, 2 * primitive.kv_width // of), -1)
    return queries, keys_values


@compute.register
def _(primitive: Attend, operands: Operands) -> tuple[Tensor, ...]:
    of, size = operands.share.piece("head")[1], primitive.head_dim
    heads, kv_heads = primitive.heads // of, primitive.kv_heads // of
    queries, kv = operands.tensors["q"], operands.tensors["kv"]
    rows, tokens, _ = queries.shape
    q = queries.view(rows, tokens, heads, size).transpose(1, 2)  # (rows, heads, T, size)
    if operands.cache is not None:
        kv = operands.cache.add(kv)
    if primitive.value_size == size:
        k, v = kv.view(rows, -1, 2 * kv_heads, size).transpose(1, 2).chunk(2, 1)
    else:
        parts = kv.split_with_sizes((kv_heads * size, kv_heads * primitive.value_size), -1)
        k, v = (part.unflatten(-1, (kv_heads, -1)).transpose(1, 2) for part in parts)
    if operands.factor is None:
        earlier = kv.shape[1] - tokens
        mask = q.new_ones(tokens, kv.shape[1], dtype=torch.bool).tril(earlier) if earlier > 0 and tokens > 1 else None
        grouped = kv_heads < heads
        mixed = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not earlier, enable_gqa=grouped)
    else:
        if kv_heads < heads:
            q = q.clone()  # so that autograd saves only this, not all features
            k, v = (x.repeat_interleave(heads // kv_heads, 1) for x in (k, v))
        mixed = attention_with_dropout(q, k, v, operands.factor)
    return (mixed.transpose(1, 2).flatten(2),)


@compute.register
def _(primitive: Route, operands: Operands) -> tuple[Tensor, ...]:
    return mixture.route(primitive.router, operands.parameters["mlp.router.weight"], operands.x, operands.share)


@compute.register
def _(primitive: Place, operands: Operands) -> tuple[Tensor, ...]:
    return (mixture.assign_slots(primitive.router, operands.tensors["choices"], operands.share),)


@compute.register
def _(primitive: Dispatch, operands: Operands) -> tuple[Tensor, ...]:
    return (mixture.dispatch(primitive.router, operands.x, operands.tensors["slots"], operands.share),)


@compute.register
def _(primitive: ExpertLinear, operands: Operands) -> tuple[Tensor, ...]:
    weight, bias = (operands.parameters.get(f"{primitive.name}.{end}") for end in ("weight", "bias"))
    assert weight is not None
    if bias is not None and primitive.in_index == "ffn":
        bias = mixture.pad_bias(bias, operands.share)
    return (mixture.expert_linear(operands.x, weight, bias),)


@compute.register
def _(primitive: ExpertActivate, operands: Operands) -> tuple[Tensor, ...]:
    return (activate(primitive.activation, operands.x),)


@compute.register
def _(primitive: Combine, operands: Operands) -> tuple[Tensor, ...]:
    return (mixture.combine(operands.x, operands.tensors["gates"], operands.tensors["slots"]),)


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Apply an activation function to the features of a linear map (..., features). The result is (..., hidden)."""
    if activation == "gelu":
        return F.gelu(x)
    if activation == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if activation == "squared_relu":
        return F.relu(x).square()
    gate, up = x.chunk(2, -1)
    return (F.silu(gate) if activation == "swiglu" else F.gelu(gate, approximate="tanh")) * up


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight over the last dim (Zhang and Sennrich 2019, arXiv 1910.07467)."""
    if x.is_cuda:  # where torch has a fused kernel
        return F.rms_norm(x, x.shape[-1:], weight, eps)
    return rms_normalize(x, eps)[0] * weight


def rms_normalize(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return x / sqrt(mean(x^2) + eps) and 1 / sqrt(mean(x^2) + eps), (..., 1); computed in float32 or float64."""
    exact = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps)
    return (exact * scale).to(x.dtype), scale.to(x.dtype)


def look_up(weight: Tensor, tokens: Tensor, first: int) -> Tensor:
    """Look up embeddings (rows, T, C) of tokens (rows, T) in a slice's `weight`, which begins at token `first`.

    Tokens of other slices give zero, so that the sum over slices is the whole look-up (Shoeybi et al. 2019, arXiv
    1909.08053, section 3).
    """
    indices, elsewhere = local_indices(tokens, first, len(weight))
    return F.embedding(indices, weight).masked_fill(elsewhere[..., None], 0)


def local_indices(tokens: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Return each token's index in the slice `first` to `first + count` (0 if outside), and whether it is outside."""
    elsewhere = (tokens < first) | (tokens >= first + count)
    return (tokens - first).masked_fill(elsewhere, 0), elsewhere


def mask_padding(logits: Tensor, tokens: int, share: Share) -> Tensor:
    """Set the scores (..., tokens of the slice) of padding beyond a vocabulary of `tokens` to -inf, in place."""
    width = logits.shape[-1]
    real = max(0, tokens - share.piece("vocab")[0] * width)
    if real < width:
        logits[..., real:].fill_(float("-inf"))
    return logits


AVAILABLE = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
"""Whether this torch has both kernels."""

GAIN = 0.97
"""Largest ratio of oneDNN's time to that of torch's kernel at which oneDNN is chosen. Higher ratios may be noise."""

BUDGET = 0.03
"""Seconds after which the timing of one product ends."""

REPEATS = range(3, 51)
"""Smallest and largest number of timed repetitions."""


class Product(NamedTuple):
    """Shape of a product with a weight (outputs, inputs).

    Attributes:
        rows: rows of the matrix that is multiplied.
        inputs: input features of the linear map.
        outputs: output features of the linear map.
        bias: whether a bias is added.
        backward: whether this is the product for the input's gradient.
    """

    rows: int
    inputs: int
    outputs: int
    bias: bool
    backward: bool


KERNEL_CHOICES: dict[Product, bool | None] = {}
"""Whether oneDNN computes a product; None if the product has occurred, but no kernel is chosen yet."""


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear map of `x` (..., inputs) to (..., outputs), by a weight (outputs, inputs) and a bias (outputs).

    Autograd cannot differentiate it.
    """
    return (
        onednn_linear(x, weight, bias)
        if _uses_onednn(x, weight, bias is not None, False)
        else F.linear(x, weight, bias)
    )


def linear_backward(gradient: Tensor, weight: Tensor) -> Tensor:
    """Turn the gradient of a linear map's output into that of its input."""
    return onednn_linear(gradient, weight.T) if _uses_onednn(gradient, weight, False, True) else gradient @ weight


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear map by oneDNN, in float32 on a CPU."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@contextmanager
def kernel_choices(choices: Mapping[Product, bool]) -> Generator[None, None, None]:
    """Use these kernel choices instead of all others inside of the context."""
    previous = KERNEL_CHOICES.copy()
    KERNEL_CHOICES.clear()
    KERNEL_CHOICES.update(choices)
    try:
        yield
    finally:
        KERNEL_CHOICES.clear()
        KERNEL_CHOICES.update(previous)


def is_onednn_faster(product: Product) -> bool:
    """Time a product by both kernels, and return whether oneDNN is faster: by the median ratio of the two times."""
    if not AVAILABLE or not torch.backends.mkldnn.enabled:
        return False
    turns = time_kernels(product, REPEATS, BUDGET)
    return median(onednn / plain for onednn, plain in turns) < GAIN


def time_kernels(product: Product, turns: range, budget: float) -> list[tuple[float, float]]:
    """Time a product by both kernels alternately. Every second repetition begins with the other kernel.

    Args:
        product: the shape.
        turns: smallest and largest number of repetitions.
        budget: seconds after which repetitions stop, once the smallest number is done.

    Returns:
        For each repetition, CPU seconds of this thread in oneDNN's and in torch's own kernel. CPU time excludes other
        programs, and it includes the other threads of a product, because this thread waits for them at the end.
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
    times: list[tuple[float, float]] = []
    until = time.perf_counter() + budget
    while len(times) < turns.start or (len(times) < turns.stop - 1 and time.perf_counter() < until):
        first = len(times) % 2 == 0
        kernel_times = {onednn: seconds(onednn) for onednn in (first, not first)}
        times.append((kernel_times[True], kernel_times[False]))
    return times


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over tokens.

    Args:
        logits: (rows, T, vocabulary).
        targets: (rows, T); a target of -1 does not count.
    """
    logits = _exact(logits).flatten(0, -2)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum")


def log_probabilities(logits: Tensor) -> Tensor:
    """Return the logarithms of the probabilities of all tokens, in float32 or float64."""
    return F.log_softmax(_exact(logits.detach()), -1)


def loss_of(log_probs: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy, given the result of `log_probabilities`. It is bitwise equal to `cross_entropy`."""
    return F.nll_loss(log_probs.flatten(0, -2), targets.flatten(), ignore_index=-1, reduction="sum")


def cross_entropy_backward(log_probs: Tensor, targets: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the cross-entropy times `scale`, a scalar, with respect to the logits, without autograd.

    Args:
        log_probs: logarithms of the probabilities, (rows, T, vocabulary).
        targets: (rows, T); a target of -1 does not count.
        scale: factor of the loss, in the dtype of the logarithms.
        dtype: dtype of the logits.
    """
    flat, total = log_probs.flatten(0, -2), torch.empty_like(scale)  # a mean would read the total weight
    gradient = torch.ops.aten.nll_loss_backward.default(scale, flat, targets.flatten(), None, 2, -1, total)
    gradient = torch.ops.aten._log_softmax_backward_data.default(gradient, flat, -1, flat.dtype)
    return gradient.view_as(log_probs).to(dtype)


def loss_stats(logits: Tensor, targets: Tensor, first: int) -> Tensor:
    """Reduce a slice of the logits to (rows, T, 3): maximum, sum of exp(logit - maximum), and the target's logit.

    The target's logit is 0 if the target lies in another slice, so that it can be summed over slices. A slice with only
    padding (every logit -inf) gives (-inf, 0, 0).

    Args:
        logits: (rows, T, tokens of the slice); -inf for padding.
        targets: (rows, T) in the whole vocabulary.
        first: the slice's first token.
    """
    logits = _exact(logits.detach())
    maximum = logits.amax(-1)
    shift = maximum.masked_fill(maximum.isneginf(), 0)
    total = (logits - shift[..., None]).exp_().sum(-1)
    indices, elsewhere = local_indices(targets, first, logits.shape[-1])
    target = logits.gather(-1, indices[..., None])[..., 0].masked_fill(elsewhere, 0)
    return torch.stack([maximum, total, target], -1)


def combine_loss(stats: Tensor, targets: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over tokens, from all slices' `loss_stats` (slices, rows, T, 3)."""
    maximum, total = _combine_stats(stats)
    losses = total.log() + maximum - stats[..., 2].sum(0)
    return losses.masked_fill(targets == -1, 0).sum()


def loss_gradient(logits: Tensor, stats: Tensor, targets: Tensor, first: int, weight: float | Tensor = 1.0) -> Tensor:
    """Return the gradient of `combine_loss` with respect to one slice's logits: softmax less 1 at the target.

    Args:
        logits, targets, first: as for `loss_stats`; the gradient has the logits' shape and dtype.
        stats: statistics of all slices, (slices, rows, T, 3).
        weight: factor of the loss; the product is rounded to the logits' dtype.
    """
    maximum, total = _combine_stats(stats)
    gradient = (_exact(logits.detach()) - maximum[..., None]).exp_().div_(total[..., None])
    indices, elsewhere = local_indices(targets, first, logits.shape[-1])
    gradient.scatter_add_(-1, indices[..., None], (elsewhere.to(gradient.dtype) - 1)[..., None])
    return gradient.masked_fill_((targets == -1)[..., None], 0).mul_(weight).to(logits.dtype)


def with_auxiliary_loss(x: Tensor, loss: Tensor, share: Share) -> Tensor:
    """Return `x` unchanged; its backward pass also differentiates a loss (as Megatron-LM's MoEAuxLossAutoScaler does).

    A primitive that calls this declares `affine`. The reported loss does not include the auxiliary loss.

    Args:
        x: a result of the primitive.
        loss: the auxiliary loss, a scalar, summed over the rank's microbatches. The backward pass differentiates its
            mean over the step's microbatches.
        share: the share in the primitive's operands.
    """
    return cast(Tensor, _WithLoss.apply(x, loss, share))


class _WithLoss(torch.autograd.Function):
    """Identity function of a tensor. Its backward pass also returns the gradient of a loss: the gradient scale, divided
    by the number of the step's microbatches.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, share: Share) -> Tensor:
        ctx.share, ctx.like = share, loss.new_ones(())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradients[0], ctx.like * (ctx.share.gradient_scale / ctx.share.step_microbatches), None


def _uses_onednn(x: Tensor, weight: Tensor, bias: bool, backward: bool) -> bool:
    """Return whether oneDNN computes a product. Record a large one in float32 on a CPU, to choose its kernel."""
    if weight.numel() < LARGE or x.dtype != torch.float32 or x.device.type != "cpu":
        return False
    outputs, inputs = weight.shape
    product = Product(x.numel() // x.shape[-1], inputs, outputs, bias, backward)
    onednn = KERNEL_CHOICES.setdefault(product, None)
    return bool(onednn and AVAILABLE and torch.backends.mkldnn.enabled)


def _combine_stats(stats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the maximum over all slices, and the sum of exp(logit - maximum)."""
    maximum = stats[..., 0].amax(0)
    return maximum, (stats[..., 1] * (stats[..., 0] - maximum).exp()).sum(0)


def _exact(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
