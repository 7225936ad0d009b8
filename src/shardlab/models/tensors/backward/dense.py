"""Passes of the dense primitives: linear maps, norms, activations, residual sums, embeddings and attention.

There are two differences from autograd. The gradient of a parameter is added directly to its total, without a temporary
tensor. And a linear map does not save its input if the input is cheap to recompute from other saved tensors: the output
of an activation function, the largest tensor of a block, is recomputed.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.attention import Attend, HeadNorm, LatentProjection, Latents, Projection
from shardlab.models.mixture import ExpertActivate
from shardlab.models.primitives import Activate, Activation, Add, Embed, Linear, Lookup, Norm, Scores
from shardlab.models.tensors.attention import consecutive_runs, rotate, rotate_back, select_rows
from shardlab.models.tensors.backward.workspace import BothPasses, Context, TensorPlaces, Weights, make_passes
from shardlab.models.tensors.compute import (
    Operands,
    activate,
    compute,
    linear_backward,
    linear_forward,
    local_indices,
    look_up,
    mask_padding,
    rms_normalize,
)


@make_passes.register
def _(primitive: Linear, places: TensorPlaces) -> BothPasses:
    return _linear(places, primitive.read, primitive.made, *places.weights_of(primitive.name, primitive.bias))


@make_passes.register
def _(primitive: Scores, places: TensorPlaces) -> BothPasses:
    """Logits of padding are -inf. The loss has no gradient there, so the backward pass is that of a linear map."""
    weight = places.weights["wte.weight" if primitive.tied else "lm_head.weight"]
    multiply, backward, keeps = _linear(places, "x", "x", weight, -1)
    logits = places.tensors["x"]

    def forward(ctx: Context) -> None:
        multiply(ctx)
        mask_padding(ctx.tensors[logits], primitive.outputs, ctx.share)

    return BothPasses(forward, backward, keeps)


@make_passes.register
def _(primitive: Projection, places: TensorPlaces) -> BothPasses:
    """One product computes one tensor, of which `q` and `kv` are views."""
    project, backward_of, keeps = _linear(places, "x", "x", *places.weights_of("attn.c_attn", primitive.bias))
    features, q, kv, block = places.tensors["x"], places.make("q"), places.make("kv"), places.block

    def forward(ctx: Context) -> None:
        project(ctx)
        whole, ctx.tensors[features] = _rotated(primitive, ctx, block, ctx.tensors[features], rotate), None
        queries = whole.shape[-1] * primitive.width // primitive.outputs
        ctx.tensors[q], ctx.tensors[kv] = whole.split_with_sizes((queries, whole.shape[-1] - queries), -1)

    def backward(ctx: Context) -> None:
        whole = side_by_side(ctx.pop_gradient(q), ctx.pop_gradient(kv))
        ctx.gradients[features] = _rotated(primitive, ctx, block, whole, rotate_back)
        backward_of(ctx)

    return BothPasses(forward, backward, keeps)


@make_passes.register
def _(primitive: HeadNorm, places: TensorPlaces) -> BothPasses:
    """The forward pass saves 1/deviation of each head."""
    q, kv, block, size = places.tensors["q"], places.tensors["kv"], places.block, primitive.head_dim
    of_queries, of_keys = (places.weights[f"attn.{name}_norm.weight"] for name in "qk")
    queries, keys_values, scale = places.make("q"), places.make("kv"), places.make()

    def heads(ctx: Context) -> tuple[Tensor, int]:
        """Return queries, keys and values viewed as heads (rows x T, heads, size), and how many are normalised."""
        together = side_by_side(ctx.tensors[q], ctx.tensors[kv])
        return together.unflatten(-1, (-1, size)), (primitive.heads + primitive.kv_heads) // ctx.share.piece("head")[1]

    def weights(ctx: Context) -> Tensor:
        return torch.cat((ctx.weights[of_queries], ctx.weights[of_keys])).view(-1, size)

    def split(whole: Tensor, ctx: Context) -> Sequence[Tensor]:
        """Split features into those of queries, and of keys and values."""
        features = ctx.weights[of_queries].numel()
        return whole.split_with_sizes((features, whole.shape[-1] - features), -1)

    def forward(ctx: Context) -> None:
        tensors_by_head, count = heads(ctx)
        normalised, ctx.tensors[scale] = rms_normalize(tensors_by_head[:, :count], primitive.eps)
        whole = torch.cat((normalised * weights(ctx), tensors_by_head[:, count:]), 1).flatten(1)
        ctx.tensors[queries], ctx.tensors[keys_values] = split(_rotated(primitive, ctx, block, whole, rotate), ctx)

    def add(totals: Weights, gradient: Tensor, _: Tensor) -> None:
        features = totals[of_queries].numel()
        totals[of_queries].add_(gradient[:features])
        totals[of_keys].add_(gradient[features:])

    def backward(ctx: Context) -> None:
        tensors_by_head, count = heads(ctx)
        whole = side_by_side(ctx.pop_gradient(queries), ctx.pop_gradient(keys_values))
        gradient = _rotated(primitive, ctx, block, whole, rotate_back).unflatten(-1, (-1, size))
        of_heads, of_weight = rms_backward(
            gradient[:, :count], tensors_by_head[:, :count], ctx.tensors[scale], weights(ctx)
        )
        of_q, of_kv = split(torch.cat((of_heads, gradient[:, count:]), 1).flatten(1), ctx)
        ctx.add_gradient(q, of_q)
        ctx.add_gradient(kv, of_kv)
        of_weight = of_weight.flatten()
        ctx.accumulate(add, of_weight, of_weight)

    return BothPasses(forward, backward, (q, kv, scale))


def _rotated(
    primitive: Projection | HeadNorm,
    ctx: Context,
    block: int,
    features: Tensor,
    rotation: Callable[[Tensor, Tensor, int], Tensor],
) -> Tensor:
    """Apply `rotate` or `rotate_back` to queries and keys, if positions are rotary."""
    if primitive.rope_theta is None:
        return features
    angles, of = ctx.factor(primitive, block), ctx.share.piece("head")[1]
    assert angles is not None, "rotary positions have angles"
    return rotation(ctx.of_sequences(features), angles, (primitive.heads + primitive.kv_heads) // of).flatten(0, 1)


def rms_backward(gradient: Tensor, x: Tensor, scale: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the input `x` and of the weight of an RMSNorm.

    Args:
        gradient: gradient of the output, (rows, ..., features).
        x: input, of the same shape.
        scale: 1/deviation, (rows, ..., 1).
        weight: (..., features).
    """
    normalised, of_normalised = x * scale, gradient * weight
    of_weight = (gradient * normalised).sum(0)
    return (of_normalised - normalised * (of_normalised * normalised).mean(-1, keepdim=True)) * scale, of_weight


@make_passes.register
def _(primitive: Latents, places: TensorPlaces) -> BothPasses:
    """The forward pass saves the features before their norms, and 1/deviation of each latent."""
    sizes, weight = primitive.sizes, places.weights["attn.latents.weight"]
    norms, lengths = [places.weights[name] for name in sizes.names], (*sizes.normed, sizes.rope_dim)
    x, result, projected, scales = places.tensors["x"], places.make("x"), places.make(), places.make()
    whole_input = [sizes.hidden_size] if sizes.q_rank is None else []

    def forward(ctx: Context) -> None:
        ctx.tensors[projected] = linear_forward(ctx.tensors[x], ctx.weights[weight], None)
        *latents, shared = ctx.tensors[projected].split_with_sizes(lengths, -1)
        results = [rms_normalize(tensors_by_head, primitive.eps) for tensors_by_head in latents]
        ctx.tensors[scales] = torch.cat([scale for _, scale in results], -1)
        normed = [
            tensors_by_head * ctx.weights[norm] for (tensors_by_head, _), norm in zip(results, norms, strict=True)
        ]
        ctx.tensors[result] = torch.cat([*([ctx.tensors[x]] if whole_input else []), *normed, shared], -1)

    def add_norms(totals: Weights, gradient: Tensor, _: Tensor) -> None:
        for norm, part in zip(norms, gradient.split_with_sizes(sizes.normed), strict=True):
            totals[norm].add_(part)

    def backward(ctx: Context) -> None:
        gradients = ctx.pop_gradient(result).split_with_sizes((*whole_input, *lengths), -1)
        parts, of_norms = list[Tensor](), list[Tensor]()
        latents, scale = ctx.tensors[projected].split_with_sizes(lengths, -1), ctx.tensors[scales].split(1, -1)
        for number, norm in enumerate(norms):
            gradient = gradients[len(whole_input) + number]
            part, of_norm = rms_backward(gradient, latents[number], scale[number], ctx.weights[norm])
            parts.append(part)
            of_norms.append(of_norm)
        whole, of_all_norms = torch.cat([*parts, gradients[-1]], -1), torch.cat(of_norms)
        ctx.accumulate(add_norms, of_all_norms, of_all_norms)
        ctx.accumulate(partial(_add_weight, weight), whole, ctx.tensors[x])
        of_x = linear_backward(whole, ctx.weights[weight])
        ctx.add_gradient(x, of_x + gradients[0] if whole_input else of_x)

    return BothPasses(forward, backward, (x, projected, scales))


@make_passes.register
def _(primitive: LatentProjection, places: TensorPlaces) -> BothPasses:
    sizes, block = primitive.sizes, places.block
    names: tuple[str, ...] = ("attn.latent_q.weight", "attn.latent_kv.weight")
    of_queries, of_keys = (places.weights[name] for name in names)
    x, q, kv = places.tensors["x"], places.make("q"), places.make("kv")

    def forward(ctx: Context) -> None:
        weights: dict[str, Tensor] = {names[0]: ctx.weights[of_queries], names[1]: ctx.weights[of_keys]}
        tensors = {"x": ctx.of_sequences(ctx.tensors[x])}
        key_parts = compute(primitive, Operands(weights, tensors, ctx.share, ctx.factor(primitive, block)))
        ctx.tensors[q], ctx.tensors[kv] = (tensors_by_head.flatten(0, 1) for tensors_by_head in key_parts)

    def backward(ctx: Context) -> None:
        heads, angles = sizes.heads // ctx.share.piece("head")[1], ctx.factor(primitive, block)
        assert angles is not None, "rotary positions have angles"

        def split(gradient: Tensor) -> Sequence[Tensor]:
            """Split the gradient of queries or keys, by heads, into rotated and other features."""
            tensors_by_head = ctx.of_sequences(gradient).unflatten(-1, (heads, -1))
            return tensors_by_head.split_with_sizes((sizes.rope_dim, sizes.nope_dim), -1)

        rotated, plain = split(ctx.pop_gradient(q))
        rotated = rotate_back(rotated.flatten(-2), angles, heads).unflatten(-1, (heads, -1))
        queries = torch.cat([rotated, plain], -1).flatten(-2).flatten(0, 1)
        keys, values = ctx.pop_gradient(kv).split_with_sizes((heads * sizes.head_dim, heads * sizes.value_dim), -1)
        rotated, plain = split(keys)
        shared = rotate_back(rotated.sum(-2), angles, 1).flatten(0, 1)
        key_parts = torch.cat([plain.flatten(-2).flatten(0, 1), values], -1)
        inputs, latent, _ = ctx.tensors[x].split_with_sizes((sizes.q_inputs, sizes.kv_rank, sizes.rope_dim), -1)
        ctx.accumulate(partial(_add_weight, of_queries), queries, inputs)
        ctx.accumulate(partial(_add_weight, of_keys), key_parts, latent)
        of_inputs = linear_backward(queries, ctx.weights[of_queries])
        ctx.add_gradient(x, torch.cat([of_inputs, linear_backward(key_parts, ctx.weights[of_keys]), shared], -1))

    return BothPasses(forward, backward, (x,))


def _linear(places: TensorPlaces, read: str, makes: str, weight: int, bias: int) -> BothPasses:
    """Prepare a linear map. Its input is recomputed in the backward pass if it is not kept."""
    x, result = places.tensors[read], places.make(makes)
    recompute = places.recompute.get(x)

    def forward(ctx: Context) -> None:
        weights = ctx.weights
        ctx.tensors[result] = linear_forward(ctx.tensors[x], weights[weight], weights[bias] if bias >= 0 else None)

    def add(totals: Weights, gradient: Tensor, read: Tensor) -> None:
        _add_weight(weight, totals, gradient, read)
        if bias >= 0:
            add_rows(totals[bias], gradient)

    def backward(ctx: Context) -> None:
        if recompute is not None:
            recompute(ctx)
        gradient = ctx.pop_gradient(result)
        ctx.accumulate(add, gradient, ctx.tensors[x])
        if recompute is not None:
            ctx.tensors[x] = None
        ctx.add_gradient(x, linear_backward(gradient, ctx.weights[weight]))

    return BothPasses(forward, backward, () if recompute else (x,))


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate the features of two matrices, or view them as one if they are adjacent in memory."""
    width = a.shape[1] + b.shape[1]
    are_adjacent = a.stride() == b.stride() == (width, 1) and b.data_ptr() == a.data_ptr() + a.shape[1] * a.itemsize
    if are_adjacent and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
        return a.as_strided((len(a), width), (width, 1))
    return torch.cat((a, b), -1)


def add_rows(total: Tensor, rows: Tensor) -> None:
    """Add the sum of a matrix's rows to a vector. It is computed as a product, in a third of the time of `sum`."""
    if total.dtype == rows.dtype and rows.dtype.itemsize > 2:  # products of 16-bit numbers may accumulate in 16 bits
        total.addmv_(rows.T, _ones(rows.shape[0], rows.dtype, rows.device))
    else:
        total.add_(rows.sum(0))


@lru_cache(maxsize=64)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=dtype, device=device)


def _add_weight(place: int, totals: Weights, gradient: Tensor, read: Tensor) -> None:
    """Add the gradient of the weight of a linear map."""
    add_product(totals[place], gradient.t(), read)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two matrices, or of two batches of matrices, to a tensor, possibly of another dtype."""
    if total.dtype != a.dtype:
        total.add_(a @ b)
    elif total.dim() == 2:
        total.addmm_(a, b)
    else:
        total.baddbmm_(a, b)


@make_passes.register
def _(primitive: Norm, places: TensorPlaces) -> BothPasses | None:
    if primitive.rms:
        # On a GPU torch has a fused kernel, so autograd is faster.
        return None if places.device == "cuda" else _rms(primitive, places)
    return _layer_norm(primitive, places)


def _layer_norm(primitive: Norm, places: TensorPlaces) -> BothPasses:
    weight, bias = places.weights_of(primitive.name, primitive.bias)
    s, result, mean, scale = places.tensors["s"], places.make("x"), places.make(), places.make()
    eps, output_mask = primitive.eps, [True, True, bias >= 0]
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

    def forward(ctx: Context) -> None:
        x, weights = ctx.tensors[s], ctx.weights
        results = torch.native_layer_norm(x, x.shape[-1:], weights[weight], weights[bias] if bias >= 0 else None, eps)
        ctx.tensors[result], ctx.tensors[mean], ctx.tensors[scale] = results

    def add(totals: Weights, of_weight: Tensor, of_bias: Tensor) -> None:
        totals[weight].add_(of_weight)
        if bias >= 0:
            totals[bias].add_(of_bias)

    def backward(ctx: Context) -> None:
        tensors, weights = ctx.tensors, ctx.weights
        x, shift = tensors[s], weights[bias] if bias >= 0 else None
        of_x, of_weight, of_bias = layer_norm_backward(
            ctx.pop_gradient(result),
            x,
            x.shape[-1:],
            tensors[mean],
            tensors[scale],
            weights[weight],
            shift,
            output_mask,
        )
        ctx.add_gradient(s, of_x)
        ctx.accumulate(add, of_weight, of_bias if bias >= 0 else of_weight)

    return BothPasses(forward, backward, (s, mean, scale))


def _rms(primitive: Norm, places: TensorPlaces) -> BothPasses:
    """Prepare an RMSNorm that saves 1/deviation of each token. Autograd would also save the normalised input."""
    weight = places.weights[f"{primitive.name}.weight"]
    s, result, scale = places.tensors["s"], places.make("x"), places.make()

    def forward(ctx: Context) -> None:
        normalised, ctx.tensors[scale] = rms_normalize(ctx.tensors[s], primitive.eps)
        ctx.tensors[result] = normalised * ctx.weights[weight]

    def add(totals: Weights, of_weight: Tensor, _: Tensor) -> None:
        totals[weight].add_(of_weight)

    def backward(ctx: Context) -> None:
        gradient = ctx.pop_gradient(result)
        of_x, of_weight = rms_backward(gradient, ctx.tensors[s], ctx.tensors[scale], ctx.weights[weight])
        ctx.add_gradient(s, of_x)
        ctx.accumulate(add, of_weight, of_weight)

    return BothPasses(forward, backward, (s, scale))


@make_passes.register
def _(primitive: Activate, places: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, primitive.tensor, places)


@make_passes.register
def _(primitive: ExpertActivate, places: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, "x", places)


def _activate(activation: Activation, name: str, places: TensorPlaces) -> BothPasses:
    x, result = places.tensors[name], places.make(name)

    def forward(ctx: Context) -> None:
        ctx.tensors[result] = activate(activation, ctx.tensors[x])

    def backward(ctx: Context) -> None:
        ctx.add_gradient(x, _activated_backward(activation, ctx.pop_gradient(result), ctx.tensors[x]))

    return BothPasses(forward, backward, (x,))


def _activated_backward(activation: Activation, gradient: Tensor, x: Tensor) -> Tensor:
    """Turn the gradient of an activation function's output into that of its input `x`."""
    if activation == "gelu" or activation == "gelu_tanh":
        approximation = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward.default(gradient, x, approximate=approximation)
    if activation == "squared_relu":
        return F.relu(x).mul_(gradient).mul_(2)
    gate, up = x.chunk(2, -1)
    if activation == "geglu":
        of_gate = torch.ops.aten.gelu_backward.default(gradient * up, gate, approximate="tanh")
        return torch.cat([of_gate, gradient * F.gelu(gate, approximate="tanh")], -1)
    return torch.cat([torch.ops.aten.silu_backward.default(gradient * up, gate), gradient * F.silu(gate)], -1)


@make_passes.register
def _(primitive: Add, places: TensorPlaces) -> BothPasses:
    bias = places.weights[primitive.bias] if primitive.bias else -1
    x, s, block = places.tensors[primitive.branch], places.tensors["s"], places.block
    total, mask = places.make("s"), places.make()

    def forward(ctx: Context) -> None:
        tensors = ctx.tensors
        branch = tensors[x] + ctx.weights[bias] if bias >= 0 else tensors[x]
        dropped = ctx.factor(primitive, block) if primitive.drops else None
        if dropped is None:
            tensors[total] = tensors[s] + branch
        else:
            tensors[mask] = dropped.flatten(0, 1)
            tensors[total] = torch.addcmul(tensors[s], branch, tensors[mask])

    def add(totals: Weights, of_bias: Tensor, _: Tensor) -> None:
        totals[bias].add_(of_bias)

    def backward(ctx: Context) -> None:
        gradient = ctx.pop_gradient(total)
        of_branch = gradient if ctx.tensors[mask] is None else gradient * ctx.tensors[mask]
        ctx.add_shared_gradient(x, of_branch)
        ctx.add_shared_gradient(s, gradient)
        if bias >= 0:
            of_bias = of_branch.sum(0)
            ctx.accumulate(add, of_bias, of_bias)

    return BothPasses(forward, backward, (mask,))


@make_passes.register
def _(primitive: Lookup, places: TensorPlaces) -> BothPasses:
    """If the vocabulary is sliced, tokens of other slices give zero, and their gradients are dropped."""
    weight, tokens, result = places.weights["wte.weight"], places.tensors["x"], places.make("x")
    # On a GPU, index_add_ adds rows in no fixed order; embedding_dense_backward is the op of torch's own gradient.
    in_order = places.device == "cpu"

    def forward(ctx: Context) -> None:
        table, (number, of) = ctx.weights[weight], ctx.share.piece("vocab")
        x: Tensor = ctx.tensors[tokens]
        ctx.tensors[result] = F.embedding(x, table) if of == 1 else look_up(table, x, number * len(table))

    def add(number: int, of: int, totals: Weights, gradient: Tensor, read: Tensor) -> None:
        total = totals[weight]
        if of > 1:
            read, elsewhere = local_indices(read, number * len(total), len(total))
            gradient = gradient.masked_fill(elsewhere[:, None], 0)
        if in_order:
            total.index_add_(0, read, gradient.to(total.dtype))
        else:
            total.add_(torch.ops.aten.embedding_dense_backward.default(gradient, read, len(total), -1, False))

    def backward(ctx: Context) -> None:
        ctx.accumulate(partial(add, *ctx.share.piece("vocab")), ctx.pop_gradient(result), ctx.tensors[tokens])

    return BothPasses(forward, backward, (tokens,))


@make_passes.register
def _(primitive: Embed, places: TensorPlaces) -> BothPasses:
    """The residual stream has separate memory, because it outlives the embedding."""
    place = places.weights["wpe.weight"] if primitive.positions else -1
    x, result, mask, block = places.tensors["x"], places.make("s"), places.make(), places.block

    def forward(ctx: Context) -> None:
        embedded: Tensor = ctx.of_sequences(ctx.tensors[x])
        s = embedded
        if place >= 0:
            s = s + select_rows(ctx.weights[place], ctx.share.tokens or range(ctx.tokens))
        if primitive.drops:
            ctx.tensors[mask] = dropped = ctx.factor(primitive, block)
            s = s if dropped is None else s * dropped
        ctx.tensors[result] = (s.clone() if s is embedded else s).flatten(0, 1)

    def add(tokens: Sequence[int], totals: Weights, gradient: Tensor, _: Tensor) -> None:
        total = gradient.unflatten(0, (-1, len(tokens))).sum(0)
        for start, stop in consecutive_runs(tokens):
            totals[place][tokens[start] : tokens[stop - 1] + 1].add_(total[start:stop])

    def backward(ctx: Context) -> None:
        gradient = ctx.pop_gradient(result)
        if ctx.tensors[mask] is not None:
            gradient = (ctx.of_sequences(gradient) * ctx.tensors[mask]).flatten(0, 1)
        ctx.add_shared_gradient(x, gradient)
        if place >= 0:
            ctx.accumulate(partial(add, ctx.share.tokens or range(ctx.tokens)), gradient, gradient)

    return BothPasses(forward, backward, (mask,))


@make_passes.register
def _(primitive: Attend, places: TensorPlaces) -> BothPasses | None:
    """Passes by torch's fused kernels: on a CPU, without dropout, and for values as wide as keys. Else by autograd."""
    if primitive.drops or primitive.value_size != primitive.head_dim or places.device != "cpu":
        return None
    size = primitive.head_dim
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, kv, result = places.tensors["q"], places.tensors["kv"], places.make("x")
    keeps = queries, keys, values, mixed, lse = [places.make() for _ in range(5)]

    def heads(x: Tensor, tokens: int) -> Tensor:
        """View (rows x T, features) as (rows, heads, T, size)."""
        return x.view(-1, tokens, x.shape[-1] // size, size).transpose(1, 2)

    def features(x: Tensor) -> Tensor:
        """Reshape (rows, heads, T, size) to (rows x T, features)."""
        return x.transpose(1, 2).reshape(-1, x.shape[1] * size)

    def forward(ctx: Context) -> None:
        tensors = ctx.tensors
        tensors_by_head = [heads(part, ctx.tokens) for part in (tensors[q], *tensors[kv].chunk(2, -1))]
        tensors[queries], tensors[keys], tensors[values] = tensors_by_head
        tensors[mixed], tensors[lse] = attend(*tensors_by_head, 0.0, True)
        tensors[result] = features(tensors[mixed])

    def backward(ctx: Context) -> None:
        saved_tensors = [ctx.tensors[place] for place in keeps]
        tensors_by_head = attend_backward(heads(ctx.pop_gradient(result), ctx.tokens), *saved_tensors, 0.0, True)
        of_queries, *of_kv = [features(gradient) for gradient in tensors_by_head]
        together = torch.cat((of_queries, *of_kv), -1)  # contiguous, as a projection reads them without a copy
        of_q, of_kv = together.split_with_sizes((of_queries.shape[-1], together.shape[-1] - of_queries.shape[-1]), -1)
        ctx.add_gradient(q, of_q)
        ctx.add_gradient(kv, of_kv)

    return BothPasses(forward, backward, tuple(keeps))
