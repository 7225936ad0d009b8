"""Both passes of linear maps: products with weights.

The gradients of their parameters are added right where they are wanted: autograd would make each in memory of its own
first. And what a map read, which only its weight's gradient reads, is not kept where it can be made again of what is
kept anyway: the output of an activation function, which is the largest tensor of a block.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from shardlab.models.attention import Projection
from shardlab.models.primitives import Linear, Scores
from shardlab.models.tensors.both_passes.primitive import BothPasses, TensorPlaces, Weights, Workspace, passes
from shardlab.models.tensors.lookup import without_padding
from shardlab.models.tensors.onednn import linear_backward, linear_forward
from shardlab.models.tensors.rotary import turned, turned_back


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
