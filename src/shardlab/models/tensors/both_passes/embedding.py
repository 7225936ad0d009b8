"""Both passes of the look-up of tokens, and of what makes the residual stream of it."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.primitives import Embed, Lookup
from shardlab.models.tensors.both_passes.primitive import BothPasses, TensorPlaces, Weights, Workspace, passes
from shardlab.models.tensors.lookup import indices_in, look_up
from shardlab.models.tensors.tokens import rows_of, runs


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
