"""The feed-forward part: two linear maps with an activation function between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter
from shardlab.models.part import Part

Activation = Literal["gelu", "squared_relu", "swiglu"]
"""Exact GELU; max(x, 0)^2 (So et al. 2021, arXiv 2109.08668); silu(gate) * up (Shazeer 2020, arXiv 2002.05202)."""

ACTIVATIONS: tuple[str, ...] = get_args(Activation)


def features_of(activation: Activation, hidden: int) -> int:
    """What the first map makes for `hidden` features after the activation: SwiGLU takes two of them for each."""
    return 2 * hidden if activation == "swiglu" else hidden


def first_cut(activation: Activation, hidden: int) -> Cut:
    """How the first map is sliced: gates and their partners alike."""
    return Cut(0, (hidden, hidden)) if activation == "swiglu" else Cut(0)


def activation_kernel(activation: Activation, rows: int, hidden: int) -> Pointwise:
    """The activation function on rows of what the first map made."""
    before, after = rows * features_of(activation, hidden), rows * hidden
    return Pointwise(activation, before + after, 2 * before + after)


@dataclass(frozen=True)
class FeedForward(Part):
    """Norm, linear map to `hidden` features, activation, linear map back, dropout; added to the residual stream.

    With SwiGLU the first map makes all gates, then all that they multiply, in one matrix. Sliced by hidden features.
    """

    title = "feed-forward"
    norm_name = "ln_2"
    added = "mlp.c_proj.bias"

    hidden: int
    activation: Activation = field(default="gelu", kw_only=True)

    @property
    def features(self) -> int:
        """What the first map makes of a token."""
        return features_of(self.activation, self.hidden)

    def parameters(self) -> list[Parameter]:
        c, hidden = self.width, self.hidden
        return [
            *self.norm(),
            *self.linear("mlp.c_fc", self.features, c, first_cut(self.activation, hidden)),
            *self.linear("mlp.c_proj", c, hidden, Cut(1)),
        ]

    def saved(self) -> int:
        return self.norm_saved + self.body_saved() + self.drops * self.stream

    def saved_for_weight(self) -> int:
        return self.norm_saved + self.body_saved_for_weight() + 2 * self.stream

    def body_saved_for_weight(self) -> int:
        return self.block * (self.features + self.hidden)

    def body_saved(self) -> int:
        return self.block * (self.features + self.hidden)

    def flops(self) -> int:
        return 2 * self.block * self.width * (self.features + self.hidden)

    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        rows, hidden = sequences * tokens, self.hidden // slices
        return (
            Matmul(rows, self.features // slices, self.width, bias=self.bias),
            activation_kernel(self.activation, rows, hidden),
            Matmul(rows, self.width, hidden),
        )

    def sliceable(self) -> dict[str, int]:
        return {"hidden features": self.hidden}
