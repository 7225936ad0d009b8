"""A transformer whose MLPs are mixtures of experts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from shardlab.models.gpt import GPT
from shardlab.models.layout import Cut, Parameter
from shardlab.models.parts import Attention, Part
from shardlab.program.errors import UserError

MOST_EXPERTS = 256
"""An expert's number travels beside the residual stream in the compute dtype; bfloat16 is exact up to here."""


@dataclass(frozen=True)
class Mixture(Part):
    """Norm, router, and MLPs (linear map, exact GELU, linear map back) of which each token takes `top_k`; dropout;
    added to the residual stream.

    Experts compute on buffers of one fixed size: `capacity` places each, for the tokens of one microbatch. Sliced by
    experts.
    """

    norm_name = "ln_2"

    hidden: int
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

    def router(self) -> Parameter:
        return Parameter("mlp.router.weight", (self.experts, self.width), True)

    def parameters(self) -> list[Parameter]:
        e, c, hidden = self.experts, self.width, self.hidden
        weights = [
            Parameter("mlp.experts.c_fc.weight", (e, hidden, c), True, Cut(0)),
            Parameter("mlp.experts.c_proj.weight", (e, c, hidden), True, Cut(0)),
        ]
        biases = [
            Parameter("mlp.experts.c_fc.bias", (e, hidden), False, Cut(0)),
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
        return 2 * self.experts * self.capacity(rows * self.block) * self.hidden

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
        return 2 * (2 * self.experts * self.capacity(self.block) * self.width * self.hidden)

    def flops(self) -> int:
        """Those of full buffers, with the capacity of one sequence."""
        return self.router_flops() + self.experts_flops()


@dataclass(frozen=True, kw_only=True)
class MoE(GPT):
    """GPT with a mixture of experts in place of every MLP.

    The router's softmax is over all experts. With one choice a token's result is weighted by its probability (Fedus et
    al. 2021, arXiv 2101.03961); with more by the choices' probabilities, made to sum to 1 (Lepikhin et al. 2020, arXiv
    2006.16668, section 2.2; Jiang et al. 2024, arXiv 2401.04088). First choices take places before second ones, and
    earlier tokens before later ones; a token that finds none passes by on the residual stream.

    >>> MoE(experts=8, top_k=2).parameter_count > GPT().parameter_count
    True

    Attributes:
        experts: of every layer, each as large as GPT's MLP.
        top_k: how many experts a token is sent to.
        capacity_factor: an expert's places for a microbatch, as a multiple of top_k * tokens / experts (None: dropless,
            with room for every token at every expert: experts * tokens * width elements a layer, which is the bound of
            what can arrive, and is taken whatever does).
        auxiliary: weight of the load-balancing loss, which is the mean over microbatches. It enters the gradient; the
            loss that is reported is the cross-entropy alone.
    """

    experts: int = 4
    top_k: int = 2
    capacity_factor: float | None = 1.25
    auxiliary: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("experts", "top_k")
        if self.experts > MOST_EXPERTS:
            raise UserError(f"experts is {self.experts}; there may be {MOST_EXPERTS} at most")
        if self.top_k > self.experts:
            raise UserError(
                f"top_k is {self.top_k}, but there are {self.experts} experts; a token reaches an expert once, so "
                f"choose top_k of at most {self.experts}"
            )
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise UserError(
                f"capacity_factor is {self.capacity_factor}; give a positive number, or None to drop no token"
            )
        if not 0 <= self.auxiliary < math.inf:
            raise UserError(f"auxiliary is {self.auxiliary}; the load-balancing loss has a weight of 0 or more")

    @property
    def mixture(self) -> Mixture:
        """Every layer's."""
        return Mixture(
            *self.common,
            hidden=4 * self.width,
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            auxiliary=self.auxiliary,
        )

    @property
    def body(self) -> tuple[Part, ...]:
        attention = Attention(*self.common, heads=self.heads, kv_heads=self.kv_heads or self.heads)
        return attention, self.mixture
