"""The primitives of a mixture of experts: route, dispatch, experts, combine.

Each token takes `top_k` of the experts. Experts compute on buffers of one fixed size: `capacity` places each, for the
tokens of one microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shardlab.models.layout import Kernel, Matmul, Parameter, Pointwise
from shardlab.models.primitives import (
    Activate,
    Activation,
    Linear,
    Pieces,
    Primitive,
    activation_kernel,
    features_of,
    piece,
)


@dataclass(frozen=True, kw_only=True)
class Router:
    """How tokens are routed.

    Attributes:
        hidden_size: features of a token, C.
        experts: how many there are.
        top_k: how many of them a token is sent to.
        capacity_factor: an expert's places for a microbatch, as a multiple of top_k * tokens / experts (None: as many
            as tokens).
        auxiliary: weight of the load-balancing loss.
    """

    hidden_size: int
    experts: int
    top_k: int
    capacity_factor: float | None
    auxiliary: float

    def capacity(self, tokens: int) -> int:
        """Places of each expert for a microbatch of so many tokens (Fedus et al. 2021, arXiv 2101.03961, eq. 3).

        Without a factor nothing is dropped: a token reaches an expert at most once, so as many places as tokens do.
        """
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * self.top_k * tokens / self.experts))

    def places(self, tokens: int) -> int:
        """Places of all experts' buffers."""
        return self.experts * self.capacity(tokens)


@dataclass(frozen=True, kw_only=True)
class Routing(Primitive):
    """A primitive that knows how tokens are routed."""

    router: Router


@dataclass(frozen=True, kw_only=True)
class Route(Routing):
    """Normalised features `x` to `gates`, each token's weights of its experts, and `choices`, their numbers (int32),
    both (rows, T, top_k). The balance of a microbatch's choices enters the gradient of each.
    """

    einsum: ClassVar[str] = "x(width) -> gates choices"
    whole: ClassVar[frozenset[str]] = frozenset({"width"})
    mixes_tokens: ClassVar[bool] = True
    affine: ClassVar[bool] = True

    def features(self, tensor: str) -> int:
        return self.router.top_k

    def parameters(self) -> tuple[Parameter, ...]:
        shape = (self.router.experts, self.router.hidden_size)
        return (Parameter("mlp.router.weight", shape, True, ("choice", "width")),)

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def keeps_beside(self, rows: int) -> int:
        """The probabilities of all experts, and the numbers of those chosen."""
        return rows * self.tokens * (self.router.experts + self.router.top_k)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """The gradient of the scores."""
        return rows * self.tokens * self.router.experts

    def flops(self) -> int:
        return 2 * self.tokens * self.router.hidden_size * self.router.experts

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows = sequences * tokens
        scores = rows * self.router.experts
        return Matmul(rows, self.router.experts, self.router.hidden_size), Pointwise("route", 2 * scores, 3 * scores)


@dataclass(frozen=True, kw_only=True)
class Place(Routing):
    """`choices` to `slots` (rows, T, top_k; int32): where each goes in the experts' buffers, -1 where none is left."""

    einsum: ClassVar[str] = "choices -> slots"
    mixes_tokens: ClassVar[bool] = True

    def features(self, tensor: str) -> int:
        return self.router.top_k

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Nothing that counts."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Dispatch(Routing):
    """Normalised features `x` to the experts' buffers `x` (experts, capacity, C), with tokens in their `slots`."""

    einsum: ClassVar[str] = "x(width) slots -> x(expert width)"
    deals: ClassVar[frozenset[str]] = frozenset({"expert"})
    mixes_tokens: ClassVar[bool] = True

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        return (self.router.experts, self.router.capacity(rows * self.tokens), self.router.hidden_size)

    def keeps(self) -> tuple[str, ...]:
        return ("slots",)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows = sequences * tokens
        moved = (rows + self.router.places(rows)) * self.router.hidden_size
        return (Pointwise("dispatch", moved, moved),)


@dataclass(frozen=True, kw_only=True)
class ExpertLinear(Routing):
    """A linear map for each expert, of its buffer `x` (experts, capacity, features)."""

    einsum: ClassVar[str] = "x(expert {in_index}) -> x(expert {out_index})"
    product: ClassVar[bool] = True

    name: str
    outputs: int
    inputs: int
    bias: bool
    out_index: str
    in_index: str
    sections: tuple[int, ...] = ()

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        return (self.router.experts, self.router.capacity(rows * self.tokens), self.outputs)

    def parameters(self) -> tuple[Parameter, ...]:
        """A bias of features that are summed over slices of `ffn` is cut as well: each slice adds its part of it."""
        experts, indices = self.router.experts, ("expert", self.out_index, self.in_index)
        shape = (experts, self.outputs, self.inputs)
        weight = Parameter(f"{self.name}.weight", shape, True, indices, self.sections, 1)
        bias = Parameter(f"{self.name}.bias", shape[:2], False, ("expert", "ffn"), self.sections, 1)
        return (weight, bias) if self.bias else (weight,)

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return (("expert", "experts", self.router.experts),)

    def flops(self) -> int:
        """Those of full buffers, with the capacity of one sequence."""
        return 2 * self.router.places(self.tokens) * self.inputs * self.outputs

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """On the full buffers of one piece."""
        experts, capacity = piece(self.router.experts, pieces, "expert"), self.router.capacity(sequences * tokens)
        outputs, inputs = piece(self.outputs, pieces, self.out_index), piece(self.inputs, pieces, self.in_index)
        return (Matmul(capacity, outputs, inputs, experts, bias=self.bias),)


@dataclass(frozen=True, kw_only=True)
class ExpertActivate(Routing):
    """An activation function on the experts' buffers `x`."""

    einsum: ClassVar[str] = "x(expert ffn) -> x(expert ffn)"
    made_again: ClassVar[bool] = True

    activation: Activation
    hidden: int

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        return (self.router.experts, self.router.capacity(rows * self.tokens), self.hidden)

    def keeps(self) -> tuple[str, ...]:
        return ("x",)

    def divides(self) -> tuple[tuple[str, str, int], ...]:
        return (("ffn", "hidden features", self.hidden),)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        experts, capacity = piece(self.router.experts, pieces, "expert"), self.router.capacity(sequences * tokens)
        return (activation_kernel(self.activation, experts * capacity, piece(self.hidden, pieces, "ffn")),)


@dataclass(frozen=True, kw_only=True)
class Combine(Routing):
    """The experts' buffers `x` to each token's results `x` (rows, T, C), weighted by its `gates` and summed; a choice
    without a slot adds nothing.
    """

    einsum: ClassVar[str] = "x(expert width) gates slots -> x(width)"
    whole: ClassVar[frozenset[str]] = frozenset({"width"})

    def features(self, tensor: str) -> int:
        return self.router.hidden_size

    def keeps(self) -> tuple[str, ...]:
        return ("x", "gates", "slots")

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows, hidden_size = sequences * tokens, self.router.hidden_size
        read, written = rows * self.router.top_k * hidden_size, rows * hidden_size
        gradient = self.router.places(rows) * hidden_size
        return (Pointwise("combine", read + written, read + written + gradient),)


def shared_experts(
    tokens: int, hidden_size: int, hidden: int, bias: bool, activation: Activation
) -> tuple[Primitive, ...]:
    """A feed-forward network of all tokens `x`, which stay for the router: its result is the branch `y`.

    Every rank has it whole, on the tokens that it has: its features go by another name than those that are cut.
    """
    features = features_of(activation, hidden)
    up = Linear(
        tokens=tokens, name="mlp.shared.c_fc", outputs=features, inputs=hidden_size, bias=bias,
        out_index="shared", in_index="width", sections=(hidden, hidden) if features > hidden else (), made="y",
    )  # fmt: skip
    down = Linear(
        tokens=tokens, name="mlp.shared.c_proj", outputs=hidden_size, inputs=hidden, bias=bias,
        out_index="width", in_index="shared", read="y", made="y",
    )  # fmt: skip
    return up, Activate(tokens=tokens, activation=activation, hidden=hidden, tensor="y", index="shared"), down


def mixture(tokens: int, router: Router, hidden: int, bias: bool, activation: Activation) -> tuple[Primitive, ...]:
    """Route, dispatch, the experts' two linear maps with an activation between them, combine."""
    features = features_of(activation, hidden)
    up = ExpertLinear(
        tokens=tokens, router=router, name="mlp.experts.c_fc", outputs=features, inputs=router.hidden_size, bias=bias,
        out_index="ffn", in_index="width", sections=(hidden, hidden) if features > hidden else (),
    )  # fmt: skip
    down = ExpertLinear(
        tokens=tokens, router=router, name="mlp.experts.c_proj", outputs=router.hidden_size, inputs=hidden, bias=bias,
        out_index="width", in_index="ffn",
    )  # fmt: skip
    return (
        Route(tokens=tokens, router=router),
        Place(tokens=tokens, router=router),
        Dispatch(tokens=tokens, router=router),
        up,
        ExpertActivate(tokens=tokens, router=router, activation=activation, hidden=hidden),
        down,
        Combine(tokens=tokens, router=router),
    )
