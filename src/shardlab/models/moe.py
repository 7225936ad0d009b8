"""A transformer whose MLPs are mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardlab.errors import UserError
from shardlab.models.gpt import GPT
from shardlab.models.mixture import Router, mixture, shared_experts
from shardlab.models.primitive import Primitive
from shardlab.models.primitives import DropoutSite

MOST_EXPERTS = 256
"""An expert's number travels beside the residual stream in the compute dtype; bfloat16 is exact up to here."""


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
        shared_experts: of these beside them, which every token is sent to: as one that is so many times as wide. They
            read what the router reads (Dai et al. 2024, arXiv 2401.06066, eq. 9).
        top_k: how many experts a token is sent to.
        capacity_factor: an expert's places for a microbatch, as a multiple of top_k * tokens / experts (None: dropless,
            with room for every token at every expert: experts * tokens * width elements a layer, which is the bound of
            what can arrive, and is taken whatever does).
        auxiliary: weight of the load-balancing loss, which is the mean over microbatches. It enters the gradient; the
            loss that is reported is the cross-entropy alone.
    """

    experts: int = 4
    shared_experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = 1.25
    auxiliary: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least_one("experts", "top_k")
        if self.shared_experts < 0:
            raise UserError(f"shared_experts is {self.shared_experts}; there may be 0 or more")
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
    def router(self) -> Router:
        """How every layer's tokens are routed."""
        return Router(
            hidden_size=self.hidden_size,
            experts=self.experts,
            top_k=self.top_k,
            capacity_factor=self.capacity_factor,
            auxiliary=self.auxiliary,
        )

    def block_parts(self) -> Sequence[tuple[str, Sequence[Primitive]]]:
        body = mixture(self.seq_len, self.router, self.hidden, self.bias, self.activation)
        experts = (*body, self.add(DropoutSite.FEED_FORWARD_OUTPUT))
        norm, hidden = self.norm_of("ln_2"), self.shared_experts * self.hidden
        if not hidden:
            return ("attention", self.attention_part()), ("experts", (norm, *experts))
        shared = shared_experts(self.seq_len, self.hidden_size, hidden, self.bias, self.activation)
        added = replace(self.add(DropoutSite.SHARED_EXPERTS_OUTPUT), branch="y")
        return ("attention", self.attention_part()), ("shared experts", (norm, *shared, added)), ("experts", experts)
