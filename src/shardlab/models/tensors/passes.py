"""Primitives with both passes written out, so that a layer needs no graph of autograd's.

A small layer's time is that of autograd's nodes, which are made, counted and called one by one. Here a layer is a list
of calls that are prepared once: tensors go by their places in a list, weights and gradients too. The tokens of all
sequences are one dim, (rows x T, features), since products take it so. Only primitives that have a function here can be
in such a layer.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.attention import Attend, Projection
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import Activate, Add, Embed, Linear, Lookup, Norm, Scores
from shardlab.models.tensors.onednn import linear_backward, linear_forward
from shardlab.models.tensors.products import add_product, add_rows

Weights = Sequence[Tensor]
"""A layer's parameters, in the order of their names; or where their gradients are added."""

AddGradients = Callable[[Weights, Tensor, Tensor], None]
"""Adds the gradients of a primitive's parameters to `Weights`, given that of its result, and what it read."""

Take = Callable[[AddGradients, Tensor, Tensor], None]
"""Takes what a primitive's parameters' gradients are made of: makes them at once, or keeps it for later."""

Forward = Callable[[list[Any], Weights], None]
"""Computes a primitive from and into a list of tensors."""

Backward = Callable[[list[Any], list[Any], Weights, Take], None]
"""From what was kept, and gradients by place: the gradients of what the primitive read."""


class BothPasses(NamedTuple):
    """A primitive's passes.

    Attributes:
        forward, backward: what is done in each.
        keeps: places of what the backward pass reads.
    """

    forward: Forward
    backward: Backward
    keeps: tuple[int, ...] = ()


@dataclass
class TensorPlaces:
    """Where the tensors of a layer lie in its list.

    Attributes:
        weights: places of the parameters, by name, in their own list.
        tensors: places of the tensors that were last made under their names.
        again: what makes a tensor again that is not kept, by its place.
        count: how many there are.
    """

    weights: dict[str, int]
    tensors: dict[str, int] = field(default_factory=dict[str, int])
    again: dict[int, Forward] = field(default_factory=dict[int, Forward])
    count: int = 0

    def make(self, name: str = "") -> int:
        """A new place, of the tensor of this name from now on; without one, of something beside."""
        place = self.count
        self.count += 1
        if name:
            self.tensors[name] = place
        return place

    def weights_of(self, name: str) -> tuple[int, int]:
        """Places of a weight and its bias; -1 for none."""
        return self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias", -1)


def _taken(gradients: list[Any], place: int) -> Tensor:
    """The gradient of a tensor, which nobody wants afterwards."""
    gradient, gradients[place] = gradients[place], None
    return gradient


def _give(gradients: list[Any], place: int, gradient: Tensor) -> None:
    """Add a gradient to that of a tensor: it has memory of its own; the older one may be another's as well."""
    older: Tensor | None = gradients[place]
    gradients[place] = gradient if older is None else gradient.add_(older)


def _hand_on(gradients: list[Any], place: int, gradient: Tensor) -> None:
    """Add a gradient to that of a tensor; its memory is another's as well."""
    older: Tensor | None = gradients[place]
    gradients[place] = gradient if older is None else gradient + older


@singledispatch
def passes(primitive: Primitive, at: TensorPlaces) -> BothPasses | None:
    """Both passes of a primitive; None where autograd makes the second. A new one registers its function here."""
    return None


@passes.register
def _(primitive: Lookup, at: TensorPlaces) -> BothPasses | None:
    weight, tokens, made = at.weights["wte.weight"], at.tensors["x"], at.make("x")

    def forward(tensors: list[Any], weights: Weights) -> None:
        tensors[made] = F.embedding(tensors[tokens], weights[weight])

    def add(rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        room = rooms[weight]
        room.add_(torch.ops.aten.embedding_dense_backward.default(gradient, read, len(room), -1, False))

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        take(add, _taken(gradients, made), kept[tokens])

    return BothPasses(forward, backward, (tokens,))


@passes.register
def _(primitive: Embed, at: TensorPlaces) -> BothPasses | None:
    if primitive.drops:
        return None
    place = at.weights["wpe.weight"] if primitive.positions else -1
    x, made, tokens = at.tensors["x"], at.make("s"), primitive.tokens

    def forward(tensors: list[Any], weights: Weights) -> None:
        given: Tensor = tensors[x]
        if place < 0:
            tensors[made] = given.clone()
        else:
            tensors[made] = (given.unflatten(0, (-1, tokens)) + weights[place]).flatten(0, 1)

    def add(rooms: Weights, gradient: Tensor, _: Tensor) -> None:
        rooms[place].add_(gradient.unflatten(0, (-1, tokens)).sum(0))

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        gradient = _taken(gradients, made)
        _hand_on(gradients, x, gradient)
        if place >= 0:
            take(add, gradient, gradient)

    return BothPasses(forward, backward)


@passes.register
def _(primitive: Norm, at: TensorPlaces) -> BothPasses | None:
    if primitive.rms:
        return None
    weight, bias = at.weights_of(primitive.name)
    s, made, mean, scale = at.tensors["s"], at.make("x"), at.make(), at.make()
    eps, wanted = primitive.eps, [True, True, bias >= 0]
    layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

    def forward(tensors: list[Any], weights: Weights) -> None:
        x: Tensor = tensors[s]
        found = torch.native_layer_norm(x, x.shape[-1:], weights[weight], weights[bias] if bias >= 0 else None, eps)
        tensors[made], tensors[mean], tensors[scale] = found

    def add(rooms: Weights, of_weight: Tensor, of_bias: Tensor) -> None:
        rooms[weight].add_(of_weight)
        if bias >= 0:
            rooms[bias].add_(of_bias)

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        x, shift = kept[s], weights[bias] if bias >= 0 else None
        of_x, of_weight, of_bias = layer_norm_backward(
            _taken(gradients, made), x, x.shape[-1:], kept[mean], kept[scale], weights[weight], shift, wanted
        )
        _give(gradients, s, of_x)
        take(add, of_weight, of_bias)

    return BothPasses(forward, backward, (s, mean, scale))


@passes.register
def _(primitive: Linear, at: TensorPlaces) -> BothPasses | None:
    return _linear(at, primitive.read, primitive.made, *at.weights_of(primitive.name))


@passes.register
def _(primitive: Scores, at: TensorPlaces) -> BothPasses | None:
    weight = at.weights["wte.weight" if primitive.tied else "lm_head.weight"]
    multiply, backward, keeps = _linear(at, "x", "x", weight, -1)
    logits, real = at.tensors["x"], primitive.outputs

    def forward(tensors: list[Any], weights: Weights) -> None:
        multiply(tensors, weights)
        if real < tensors[logits].shape[-1]:
            tensors[logits][..., real:].fill_(float("-inf"))  # where no loss has a gradient

    return BothPasses(forward, backward, keeps)


@passes.register
def _(primitive: Projection, at: TensorPlaces) -> BothPasses | None:
    if primitive.rope_theta is not None:
        return None
    project, backward_of, keeps = _linear(at, "x", "x", *at.weights_of("attn.c_attn"))
    features, q, kv = at.tensors["x"], at.make("q"), at.make("kv")
    share, of_all = primitive.hidden_size, primitive.outputs

    def forward(tensors: list[Any], weights: Weights) -> None:
        project(tensors, weights)
        whole, tensors[features] = tensors[features], None
        queries = whole.shape[-1] * share // of_all
        tensors[q], tensors[kv] = whole.split_with_sizes((queries, whole.shape[-1] - queries), -1)

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        gradients[features] = torch.cat((_taken(gradients, q), *_taken(gradients, kv)), -1)
        backward_of(kept, gradients, weights, take)

    return BothPasses(forward, backward, keeps)


@passes.register
def _(primitive: Attend, at: TensorPlaces) -> BothPasses | None:
    """On a CPU, where torch has one kernel for it."""
    if primitive.drops or primitive.kv_heads < primitive.heads:
        return None
    size, tokens = primitive.hidden_size // primitive.heads, primitive.tokens
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    attend_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    q, kv, made = at.tensors["q"], at.tensors["kv"], at.make("x")
    kept_here = queries, keys, values, mixed, lse = [at.make() for _ in range(5)]

    def heads(x: Tensor) -> Tensor:
        """(rows x T, features) to (rows, heads, T, size)."""
        return x.view(-1, tokens, x.shape[-1] // size, size).transpose(1, 2)

    def features(x: Tensor) -> Tensor:
        """(rows, heads, T, size) to (rows x T, features)."""
        return x.transpose(1, 2).reshape(-1, x.shape[1] * size)

    def forward(tensors: list[Any], weights: Weights) -> None:
        each = [heads(part) for part in (tensors[q], *tensors[kv].chunk(2, -1))]
        tensors[queries], tensors[keys], tensors[values] = each
        tensors[mixed], tensors[lse] = attend(*each, 0.0, True)
        tensors[made] = features(tensors[mixed])

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        each = attend_backward(
            heads(_taken(gradients, made)), kept[queries], kept[keys], kept[values], kept[mixed], kept[lse], 0.0, True
        )
        gradients[q], *gradients[kv] = [features(gradient) for gradient in each]

    return BothPasses(forward, backward, tuple(kept_here))


@passes.register
def _(primitive: Activate, at: TensorPlaces) -> BothPasses | None:
    if primitive.activation not in ("gelu", "gelu_tanh"):
        return None
    how = "tanh" if primitive.activation == "gelu_tanh" else "none"
    x, made = at.tensors[primitive.tensor], at.make(primitive.tensor)

    def forward(tensors: list[Any], weights: Weights) -> None:
        tensors[made] = F.gelu(tensors[x], approximate=how)

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        gradient = torch.ops.aten.gelu_backward.default(_taken(gradients, made), kept[x], approximate=how)
        _give(gradients, x, gradient)

    return BothPasses(forward, backward, (x,))


@passes.register
def _(primitive: Add, at: TensorPlaces) -> BothPasses | None:
    if primitive.drops:
        return None
    bias = at.weights[primitive.bias] if primitive.bias else -1
    x, s, total = at.tensors[primitive.branch], at.tensors["s"], at.make("s")

    def forward(tensors: list[Any], weights: Weights) -> None:
        branch = tensors[x] + weights[bias] if bias >= 0 else tensors[x]
        tensors[total] = tensors[s] + branch

    def add(rooms: Weights, of_bias: Tensor, _: Tensor) -> None:
        rooms[bias].add_(of_bias)

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        gradient = _taken(gradients, total)
        _hand_on(gradients, x, gradient)
        _hand_on(gradients, s, gradient)
        if bias >= 0:
            of_bias = gradient.sum(0)
            take(add, of_bias, of_bias)

    return BothPasses(forward, backward)


def _linear(at: TensorPlaces, read: str, result: str, weight: int, bias: int) -> BothPasses:
    """A linear map; what it read is made again if it is not kept."""
    x, made = at.tensors[read], at.make(result)
    again = at.again.get(x)

    def forward(tensors: list[Any], weights: Weights) -> None:
        tensors[made] = linear_forward(tensors[x], weights[weight], weights[bias] if bias >= 0 else None)

    def add(rooms: Weights, gradient: Tensor, read: Tensor) -> None:
        add_product(rooms[weight], gradient.t(), read)
        if bias >= 0:
            add_rows(rooms[bias], gradient)

    def backward(kept: list[Any], gradients: list[Any], weights: Weights, take: Take) -> None:
        if again is not None:
            again(kept, weights)
        gradient = _taken(gradients, made)
        take(add, gradient, kept[x])
        if again is not None:
            kept[x] = None
        _give(gradients, x, linear_backward(gradient, weights[weight]))

    return BothPasses(forward, backward, () if again else (x,))
