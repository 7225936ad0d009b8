"""Both passes of linear maps: products with weights.

The gradients of their parameters are added right where they are wanted: autograd would make each in memory of its own
first. And what a map read, which only its weight's gradient reads, is not kept where it can be made again of what is
kept anyway: the output of an activation function, which is the largest tensor of a block.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.attention import Attend, Projection
from shardlab.models.mixture import ExpertActivate
from shardlab.models.primitives import Activate, Activation, Add, Embed, Linear, Lookup, Norm, Scores
from shardlab.models.tensors.attention import rows_of, runs, turned, turned_back
from shardlab.models.tensors.backward.workspace import BothPasses, TensorPlaces, Weights, Workspace, passes
from shardlab.models.tensors.compute import (
    activated,
    indices_in,
    linear_backward,
    linear_forward,
    look_up,
    scaled,
    without_padding,
)


@passes.register
def _(primitive: Linear, at: TensorPlaces) -> BothPasses:
    return _linear(at, primitive.read, primitive.made, *at.weights_of(primitive.name, primitive.bias))


@passes.register
def _(primitive: Scores, at: TensorPlaces) -> BothPasses:
    """Scores beyond the vocabulary are -inf, where no loss has a gradient."""
    weight = at.weights["wte.weight" if primitive.tied else "lm_head.weight"]
    multiply, backward, keeps = _linear(at, "x", "x", weight, -1)
    logits = at.tensors["x"]

    def forward(its: Workspace) -> None:
        multiply(its)
        without_padding(its.tensors[logits], primitive.outputs, its.share)

    return BothPasses(forward, backward, keeps)


@passes.register
def _(primitive: Projection, at: TensorPlaces) -> BothPasses:
    """Queries, and keys and values, are views of one tensor."""
    project, backward_of, keeps = _linear(at, "x", "x", *at.weights_of("attn.c_attn", primitive.bias))
    features, q, kv, block = at.tensors["x"], at.make("q"), at.make("kv"), at.block
    heads, turns = primitive.heads + primitive.kv_heads, primitive.rope_theta is not None
    share, of_all = primitive.hidden_size, primitive.outputs

    def turn(its: Workspace, whole: Tensor, how: Callable[[Tensor, Tensor, int], Tensor]) -> Tensor:
        """Turn queries and keys, or turn them back."""
        if not turns:
            return whole
        angles = its.factor(primitive, block)
        assert angles is not None, "rotary positions have angles"
        return how(its.of_sequences(whole), angles, heads // its.share.piece("head")[1]).flatten(0, 1)

    def forward(its: Workspace) -> None:
        project(its)
        whole, its.tensors[features] = turn(its, its.tensors[features], turned), None
        queries = whole.shape[-1] * share // of_all
        its.tensors[q], its.tensors[kv] = whole.split_with_sizes((queries, whole.shape[-1] - queries), -1)

    def backward(its: Workspace) -> None:
        whole = side_by_side(its.taken(q), its.taken(kv))
        its.gradients[features] = turn(its, whole, turned_back)
        backward_of(its)

    return BothPasses(forward, backward, keeps)


def _linear(at: TensorPlaces, read: str, result: str, weight: int, bias: int) -> BothPasses:
    """A linear map; what it read is made again if it is not kept."""
    x, made = at.tensors[read], at.make(result)
    again = at.again.get(x)

    def forward(its: Workspace) -> None:
        weights = its.weights
        its.tensors[made] = linear_forward(its.tensors[x], weights[weight], weights[bias] if bias >= 0 else None)

    def add(rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        add_product(rooms[weight], gradient.t(), read)
        if bias >= 0:
            add_rows(rooms[bias], gradient)

    def backward(its: Workspace) -> None:
        if again is not None:
            again(its)
        gradient = its.taken(made)
        its.take(add, gradient, its.tensors[x])
        if again is not None:
            its.tensors[x] = None
        its.give(x, linear_backward(gradient, its.weights[weight]))

    return BothPasses(forward, backward, () if again else (x,))


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """Concatenate the features of two matrices, or view them as one if they lie side by side in memory."""
    width = a.shape[1] + b.shape[1]
    beside = a.stride() == b.stride() == (width, 1) and b.data_ptr() == a.data_ptr() + a.shape[1] * a.itemsize
    if beside and a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr():
        return a.as_strided((len(a), width), (width, 1))
    return torch.cat((a, b), -1)


def add_rows(room: Tensor, rows: Tensor) -> None:
    """Add the sum of a matrix's rows to a vector: as a product, which needs a third of the time of a sum."""
    if room.dtype == rows.dtype and rows.dtype.itemsize > 2:  # products of short numbers may add in those
        room.addmv_(rows.T, _ones(rows.shape[0], rows.dtype, rows.device))
    else:
        room.add_(rows.sum(0))


@lru_cache(maxsize=64)
def _ones(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.ones(count, dtype=dtype, device=device)


def add_product(room: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product of two matrices, or of two lots of matrices, to a tensor, which may be of other numbers."""
    if room.dtype != a.dtype:
        room.add_(a @ b)
    elif room.dim() == 2:
        room.addmm_(a, b)
    else:
        room.baddbmm_(a, b)


# Both passes of a normalisation.


@passes.register
def _(primitive: Norm, at: TensorPlaces) -> BothPasses | None:
    if primitive.rms:
        return None if at.device == "cuda" else _rms(primitive, at)  # where torch has a kernel for it
    return _layer_norm(primitive, at)


def _layer_norm(primitive: Norm, at: TensorPlaces) -> BothPasses:
    weight, bias = at.weights_of(primitive.name, primitive.bias)
    s, made, mean, scale = at.tensors["s"], at.make("x"), at.make(), at.make()
    eps, wanted = primitive.eps, [True, True, bias >= 0]
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

    def forward(its: Workspace) -> None:
        x, weights = its.tensors[s], its.weights
        found = torch.native_layer_norm(x, x.shape[-1:], weights[weight], weights[bias] if bias >= 0 else None, eps)
        its.tensors[made], its.tensors[mean], its.tensors[scale] = found

    def add(rooms: Weights, of_weight: Tensor, of_bias: Tensor) -> None:
        rooms[weight].add_(of_weight)
        if bias >= 0:
            rooms[bias].add_(of_bias)

    def backward(its: Workspace) -> None:
        kept, weights = its.tensors, its.weights
        x, shift = kept[s], weights[bias] if bias >= 0 else None
        of_x, of_weight, of_bias = layer_norm_backward(
            its.taken(made), x, x.shape[-1:], kept[mean], kept[scale], weights[weight], shift, wanted
        )
        its.give(s, of_x)
        its.take(add, of_weight, of_bias if bias >= 0 else of_weight)

    return BothPasses(forward, backward, (s, mean, scale))


def _rms(primitive: Norm, at: TensorPlaces) -> BothPasses:
    """Keeps 1/deviation of each token: autograd would keep the normalised input as well as the input."""
    weight = at.weights[f"{primitive.name}.weight"]
    s, made, scale = at.tensors["s"], at.make("x"), at.make()

    def forward(its: Workspace) -> None:
        normalised, its.tensors[scale] = scaled(its.tensors[s], primitive.eps)
        its.tensors[made] = normalised * its.weights[weight]

    def add(rooms: Weights, of_weight: Tensor, _: Tensor) -> None:
        rooms[weight].add_(of_weight)

    def backward(its: Workspace) -> None:
        gradient = its.taken(made)
        normalised = its.tensors[s] * its.tensors[scale]
        given = gradient * its.weights[weight]
        of_weight = (gradient * normalised).sum(0)
        its.give(s, (given - normalised * (given * normalised).mean(-1, keepdim=True)) * its.tensors[scale])
        its.take(add, of_weight, of_weight)

    return BothPasses(forward, backward, (s, scale))


# Both passes of activation functions, and of the sum of a branch and the residual stream.


@passes.register
def _(primitive: Activate, at: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, primitive.tensor, at)


@passes.register
def _(primitive: ExpertActivate, at: TensorPlaces) -> BothPasses:
    return _activate(primitive.activation, "x", at)


def _activate(activation: Activation, name: str, at: TensorPlaces) -> BothPasses:
    x, made = at.tensors[name], at.make(name)

    def forward(its: Workspace) -> None:
        its.tensors[made] = activated(activation, its.tensors[x])

    def backward(its: Workspace) -> None:
        its.give(x, _activated_backward(activation, its.taken(made), its.tensors[x]))

    return BothPasses(forward, backward, (x,))


def _activated_backward(activation: Activation, gradient: Tensor, x: Tensor) -> Tensor:
    """Turn the gradient of what an activation function makes into that of the features `x` that it was given."""
    if activation == "gelu" or activation == "gelu_tanh":
        how = "tanh" if activation == "gelu_tanh" else "none"
        return torch.ops.aten.gelu_backward.default(gradient, x, approximate=how)
    if activation == "squared_relu":
        return F.relu(x).mul_(gradient).mul_(2)
    gate, up = x.chunk(2, -1)
    return torch.cat([torch.ops.aten.silu_backward.default(gradient * up, gate), gradient * F.silu(gate)], -1)


@passes.register
def _(primitive: Add, at: TensorPlaces) -> BothPasses:
    bias = at.weights[primitive.bias] if primitive.bias else -1
    x, s, total, mask, block = at.tensors[primitive.branch], at.tensors["s"], at.make("s"), at.make(), at.block

    def forward(its: Workspace) -> None:
        tensors = its.tensors
        branch = tensors[x] + its.weights[bias] if bias >= 0 else tensors[x]
        dropped = its.factor(primitive, block) if primitive.drops else None
        if dropped is None:
            tensors[total] = tensors[s] + branch
        else:
            tensors[mask] = dropped.flatten(0, 1)
            tensors[total] = torch.addcmul(tensors[s], branch, tensors[mask])

    def add(rooms: Weights, of_bias: Tensor, _: Tensor) -> None:
        rooms[bias].add_(of_bias)

    def backward(its: Workspace) -> None:
        gradient = its.taken(total)
        of_branch = gradient if its.tensors[mask] is None else gradient * its.tensors[mask]
        its.hand_on(x, of_branch)
        its.hand_on(s, gradient)
        if bias >= 0:
            of_bias = of_branch.sum(0)
            its.take(add, of_bias, of_bias)

    return BothPasses(forward, backward, (mask,))


# Both passes of the look-up of tokens, and of what makes the residual stream of it.


@passes.register
def _(primitive: Lookup, at: TensorPlaces) -> BothPasses:
    """A slice of the vocabulary gives zero for tokens of other slices, and adds nothing of their gradients."""
    weight, tokens, made = at.weights["wte.weight"], at.tensors["x"], at.make("x")
    in_order = at.device == "cpu"  # elsewhere rows are added as threads come, by another op than torch's own gradient

    def forward(its: Workspace) -> None:
        table, (number, of) = its.weights[weight], its.share.piece("vocab")
        x: Tensor = its.tensors[tokens]
        its.tensors[made] = F.embedding(x, table) if of == 1 else look_up(table, x, number * len(table))

    def add(number: int, of: int, rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        room = rooms[weight]
        if of > 1:
            read, elsewhere = indices_in(read, number * len(room), len(room))
            gradient = gradient.masked_fill(elsewhere[:, None], 0)
        if in_order:
            room.index_add_(0, read, gradient.to(room.dtype))
        else:
            room.add_(torch.ops.aten.embedding_dense_backward.default(gradient, read, len(room), -1, False))

    def backward(its: Workspace) -> None:
        its.take(partial(add, *its.share.piece("vocab")), its.taken(made), its.tensors[tokens])

    return BothPasses(forward, backward, (tokens,))


@passes.register
def _(primitive: Embed, at: TensorPlaces) -> BothPasses:
    """A residual stream is memory of its own, which outlives the embedding."""
    place = at.weights["wpe.weight"] if primitive.positions else -1
    x, made, mask, block = at.tensors["x"], at.make("s"), at.make(), at.block

    def forward(its: Workspace) -> None:
        given: Tensor = its.of_sequences(its.tensors[x])
        s = given
        if place >= 0:
            s = s + rows_of(its.weights[place], its.share.tokens or range(its.tokens))
        if primitive.drops:
            its.tensors[mask] = dropped = its.factor(primitive, block)
            s = s if dropped is None else s * dropped
        its.tensors[made] = (s.clone() if s is given else s).flatten(0, 1)

    def add(tokens: Sequence[int], rooms: Weights, gradient: Tensor, _: Tensor) -> None:
        total = gradient.unflatten(0, (-1, len(tokens))).sum(0)
        for start, stop in runs(tokens):
            rooms[place][tokens[start] : tokens[stop - 1] + 1].add_(total[start:stop])

    def backward(its: Workspace) -> None:
        gradient = its.taken(made)
        if its.tensors[mask] is not None:
            gradient = (its.of_sequences(gradient) * its.tensors[mask]).flatten(0, 1)
        its.hand_on(x, gradient)
        if place >= 0:
            its.take(partial(add, its.share.tokens or range(its.tokens)), gradient, gradient)

    return BothPasses(forward, backward, (mask,))


# Both passes of causal attention.


@passes.register
def _(primitive: Attend, at: TensorPlaces) -> BothPasses | None:
    """On a CPU, where torch has one kernel for it."""
    if primitive.drops or at.device != "cpu":
        return None
    size = primitive.hidden_size // primitive.heads
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, kv, made = at.tensors["q"], at.tensors["kv"], at.make("x")
    keeps = queries, keys, values, mixed, lse = [at.make() for _ in range(5)]

    def heads(x: Tensor, tokens: int) -> Tensor:
        """(rows x T, features) to (rows, heads, T, size)."""
        return x.view(-1, tokens, x.shape[-1] // size, size).transpose(1, 2)

    def features(x: Tensor) -> Tensor:
        """(rows, heads, T, size) to (rows x T, features)."""
        return x.transpose(1, 2).reshape(-1, x.shape[1] * size)

    def forward(its: Workspace) -> None:
        tensors = its.tensors
        each = [heads(part, its.tokens) for part in (tensors[q], *tensors[kv].chunk(2, -1))]
        tensors[queries], tensors[keys], tensors[values] = each
        tensors[mixed], tensors[lse] = attend(*each, 0.0, True)
        tensors[made] = features(tensors[mixed])

    def backward(its: Workspace) -> None:
        kept = [its.tensors[place] for place in keeps]
        each = attend_backward(heads(its.taken(made), its.tokens), *kept, 0.0, True)
        of_queries, *of_kv = [features(gradient) for gradient in each]
        together = torch.cat((of_queries, *of_kv), -1)  # as a projection wants them, which makes no copy then
        of_q, of_kv = together.split_with_sizes((of_queries.shape[-1], together.shape[-1] - of_queries.shape[-1]), -1)
        its.give(q, of_q)
        its.give(kv, of_kv)

    return BothPasses(forward, backward, tuple(keeps))
