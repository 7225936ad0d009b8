"""Primitives of a mixture of experts: route, place, dispatch, experts, combine.

Each token goes to `top_k` of the experts. Experts compute on buffers of fixed size: `capacity` slots for each expert
and microbatch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from shardlab.models.layout import Kernel, Matmul, Parameter, Pointwise
from shardlab.models.primitives import Activation, Pieces, Primitive, activation_kernel, features_of, piece


@dataclass(frozen=True, kw_only=True)
class Router:
    """Settings of the routing of tokens.

    Attributes:
        hidden_size: features C of a token.
        experts: number of experts.
        top_k: number of experts to which a token is sent.
        capacity_factor: an expert's slots for a microbatch, as a multiple of top_k * tokens / experts (None: one slot
            for each token).
        auxiliary: weight of the load-balancing loss.
    """

    hidden_size: int
    experts: int
    top_k: int
    capacity_factor: float | None
    auxiliary: float

    def capacity(self, tokens: int) -> int:
        """Return the slots of each expert for a microbatch of `tokens` tokens (Fedus et al. 2021, arXiv 2101.03961, eq.
        3).

        Without a capacity factor no token is dropped: a token reaches an expert at most once, so one slot for each
        token is enough.
        """
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * self.top_k * tokens / self.experts))

    def places(self, tokens: int) -> int:
        """Return the number of slots of all experts together."""
        return self.experts * self.capacity(tokens)


@dataclass(frozen=True, kw_only=True)
class Routing(Primitive):
    """Primitive that has a router."""

    router: Router


@dataclass(frozen=True, kw_only=True)
class Route(Routing):
    """Router: normalised features `x` to `gates` and `choices`, both (rows, T, top_k).

    `gates` are the weights of a token's experts, and `choices` are their numbers (int32). The backward pass adds the
    gradient of each microbatch's load-balancing loss.
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
        """Return the number of saved elements: all experts' probabilities, and the numbers of the chosen experts."""
        return rows * self.tokens * (self.router.experts + self.router.top_k)

    def gradients_for_weight(self) -> tuple[str, ...]:
        return ()

    def keeps_beside_for_weight(self, rows: int) -> int:
        """Return the number of elements in the gradient of the scores."""
        return rows * self.tokens * self.router.experts

    def flops(self) -> int:
        return 2 * self.tokens * self.router.hidden_size * self.router.experts

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows = sequences * tokens
        scores = rows * self.router.experts
        return Matmul(rows, self.router.experts, self.router.hidden_size), Pointwise("route", 2 * scores, 3 * scores)


@dataclass(frozen=True, kw_only=True)
class Place(Routing):
    """Assignment of slots: `choices` to `slots` (rows, T, top_k; int32), -1 if the expert has no slot left."""

    einsum: ClassVar[str] = "choices -> slots"
    mixes_tokens: ClassVar[bool] = True

    def features(self, tensor: str) -> int:
        return self.router.top_k

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return no kernels, since their time is negligible."""
        return ()


@dataclass(frozen=True, kw_only=True)
class Dispatch(Routing):
    """Copy of each token's normalised features `x` to the token's slots in the experts' buffers.

    The output, (experts, capacity, C), is called `x` too.
    """

    einsum: ClassVar[str] = "x(width) slots -> x(expert width)"
    deals: ClassVar[frozenset[str]] = frozenset({"expert"})
    mixes_tokens: ClassVar[bool] = True

    def shape(self, tensor: str, rows: int) -> tuple[int, ...]:
        return (self.router.experts, self.router.capacity(rows * self.tokens), self.router.hidden_size)

    def keeps(self) -> tuple[str, ...]:
        return ("slots",)

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows = sequences * tokens
        elements = (rows + self.router.places(rows)) * self.router.hidden_size
        return (Pointwise("dispatch", elements, elements),)


@dataclass(frozen=True, kw_only=True)
class ExpertLinear(Routing):
    """Linear map for each expert, of its buffer `x` (experts, capacity, features)."""

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
        """Weight and bias. If `ffn` is cut and summed over, the bias is cut too, and each slice adds its part."""
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
        """FLOPs on full buffers, with the capacity of one sequence."""
        return 2 * self.router.places(self.tokens) * self.inputs * self.outputs

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        """Return the kernels on the full buffers of one piece."""
        experts, capacity = piece(self.router.experts, pieces, "expert"), self.router.capacity(sequences * tokens)
        outputs, inputs = piece(self.outputs, pieces, self.out_index), piece(self.inputs, pieces, self.in_index)
        return (Matmul(capacity, outputs, inputs, experts, bias=self.bias),)


@dataclass(frozen=True, kw_only=True)
class ExpertActivate(Routing):
    """Activation function on the experts' buffers `x`."""

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
    """Sum of each token's results, weighted by its `gates`: from the experts' buffers `x` to `x` (rows, T, C).

    A choice without a slot adds nothing.
    """

    einsum: ClassVar[str] = "x(expert width) gates slots -> x(width)"
    whole: ClassVar[frozenset[str]] = frozenset({"width"})

    def features(self, tensor: str) -> int:
        return self.router.hidden_size

    def keeps(self) -> tuple[str, ...]:
        return ("x", "gates", "slots")

    def kernels(self, sequences: int, tokens: int, pieces: Pieces) -> tuple[Kernel, ...]:
        rows, hidden_size = sequences * tokens, self.router.hidden_size
        inputs, outputs = rows * self.router.top_k * hidden_size, rows * hidden_size
        gradient = self.router.places(rows) * hidden_size
        return (Pointwise("combine", inputs + outputs, inputs + outputs + gradient),)


def mixture(tokens: int, router: Router, hidden: int, bias: bool, activation: Activation) -> tuple[Primitive, ...]:
    """Return the primitives of a mixture: route, place, dispatch, two linear maps with an activation between them,
    combine.
    """
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
