"""A mixture of experts: what it is made of, and its arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shardlab.models.feed_forward import Activation, activation_kernel, features_of
from shardlab.models.kernels import Kernel, Matmul, Pointwise
from shardlab.models.layout import Cut, Parameter
from shardlab.models.part import Part


@dataclass(frozen=True)
class Mixture(Part):
    """Norm, router, and MLPs (linear map, activation, linear map back) of which each token takes `top_k`; dropout;
    added to the residual stream.

    Experts compute on buffers of one fixed size: `capacity` places each, for the tokens of one microbatch. Sliced by
    experts.
    """

    title = "experts"
    norm_name = "ln_2"

    hidden: int
    experts: int
    top_k: int
    capacity_factor: float | None
    auxiliary: float
    activation: Activation = field(default="gelu", kw_only=True)

    def capacity(self, tokens: int) -> int:
        """Places of each expert for a microbatch of so many tokens (Fedus et al. 2021, arXiv 2101.03961, eq. 3).

        Without a factor nothing is dropped: a token reaches an expert at most once, so as many places as tokens do.
        """
        if self.capacity_factor is None:
            return tokens
        return min(tokens, math.ceil(self.capacity_factor * self.top_k * tokens / self.experts))

    @property
    def features(self) -> int:
        """What an expert's first map makes of a token."""
        return features_of(self.activation, self.hidden)

    def router(self) -> Parameter:
        return Parameter("mlp.router.weight", (self.experts, self.width), True)

    def parameters(self) -> list[Parameter]:
        e, c = self.experts, self.width
        weights = [
            Parameter("mlp.experts.c_fc.weight", (e, self.features, c), True, Cut(0)),
            Parameter("mlp.experts.c_proj.weight", (e, c, self.hidden), True, Cut(0)),
        ]
        biases = [
            Parameter("mlp.experts.c_fc.bias", (e, self.features), False, Cut(0)),
            Parameter("mlp.experts.c_proj.bias", (e, c), False, Cut(0)),
        ]
        return [*self.norm(), self.router(), *weights, *(biases if self.bias else [])]

    def routing_saved(self, rows: int) -> int:
        """What the norm and the router keep: the choices' probabilities, numbers and places (both int32), the gates."""
        return rows * (self.norm_saved + self.block * (self.experts + 2 * self.top_k))

    def buffers(self, rows: int) -> int:
        """Elements of all experts' buffers."""
        return self.experts * self.capacity(rows * self.block) * self.width

    def experts_saved(self, rows: int) -> int:
        """What the experts keep beyond their buffers."""
        return self.experts * self.capacity(rows * self.block) * (self.features + self.hidden)

    def microbatch_saved(self, rows: int) -> int:
        gates = rows * self.block * self.top_k
        dropped = self.drops * rows * self.stream
        return self.routing_saved(rows) + gates + 2 * self.buffers(rows) + self.experts_saved(rows) + dropped

    def saved(self) -> int:
        return self.microbatch_saved(1)

    def saved_for_weight(self) -> int:
        """A bound, not measured: all that was saved, and the gradients of what norm, router and experts make."""
        return self.saved() + 2 * self.stream + self.buffers(1) + self.experts_saved(1)

    def body_saved(self) -> int:
        raise AssertionError("a mixture is cut by experts (ExpertLayers), not in half-blocks")

    def router_flops(self) -> int:
        return 2 * self.block * self.width * self.experts

    def experts_flops(self) -> int:
        return 2 * self.experts * self.capacity(self.block) * self.width * (self.features + self.hidden)

    def flops(self) -> int:
        """Those of full buffers, with the capacity of one sequence."""
        return self.router_flops() + self.experts_flops()

    def kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        return (
            *self.routing_kernels(sequences, tokens),
            *self.body_kernels(sequences, tokens, slices),
            *self.combining_kernels(sequences, tokens),
        )

    def routing_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """Norm, router, and the copy of tokens into the experts' buffers."""
        rows = sequences * tokens
        scores, moved = rows * self.experts, rows * self.width + self._places(rows) * self.width
        return (
            *self.norm_kernels(sequences, tokens),
            Matmul(rows, self.experts, self.width),
            Pointwise("route", 2 * scores, 3 * scores),
            Pointwise("dispatch", moved, moved),
        )

    def body_kernels(self, sequences: int, tokens: int, slices: int = 1) -> tuple[Kernel, ...]:
        """The experts of one slice, on full buffers."""
        experts, capacity = self.experts // slices, self.capacity(sequences * tokens)
        return (
            Matmul(capacity, self.features, self.width, experts, bias=self.bias),
            activation_kernel(self.activation, experts * capacity, self.hidden),
            Matmul(capacity, self.width, self.hidden, experts, bias=self.bias),
        )

    def combining_kernels(self, sequences: int, tokens: int) -> tuple[Kernel, ...]:
        """Each token's results, weighted and summed, and what follows a part's body."""
        rows = sequences * tokens
        read, written = rows * self.top_k * self.width, rows * self.width
        gradient = self._places(rows) * self.width
        combine = Pointwise("combine", read + written, read + written + gradient)
        return (combine, *self.residual_kernels(sequences, tokens))

    def _places(self, rows: int) -> int:
        """Of all experts' buffers."""
        return self.experts * self.capacity(rows)
