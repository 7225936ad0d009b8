"""Computation of a plan on one microbatch and layer: whole layers, or half-blocks with tensor parallelism.

Both keep the same keys: activations[l, m] enters layer l, grad_activations[l, m] is its gradient.
"""

from __future__ import annotations

from typing import Literal, Protocol

from shardlab.program import LayerKind, Rank, Value
from shardlab.strategies.context import Attention
from shardlab.strategies.expert_computing import Mixture
from shardlab.strategies.plan import Plan

Keeps = Literal["all", "input", "nothing"]
"""What a forward pass leaves to the backward pass: its input and what autograd needs, or less, to be computed again."""


class Compute(Protocol):
    """A layer's passes; each finds its inputs in the rank's stores and leaves its results there."""

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps) -> None: ...
    async def loss(self, m: int) -> None: ...
    async def backward(self, layer: int, m: int, weight: Value) -> Value: ...
    async def backward_input(self, layer: int, m: int, weight: Value) -> None: ...
    def backward_weight(self, layer: int, m: int) -> Value: ...


class Whole:
    """Layers as they are."""

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank = rank

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps) -> None:
        rank, x = self.rank, self.rank.activations[layer, m]
        rank.activations[layer + 1, m] = rank.forward(layer, x, weight, save=keeps == "all")

    async def loss(self, m: int) -> None:
        rank, last = self.rank, len(self.rank.layers)
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)))

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        rank = self.rank
        grad_weight, rank.grad_activations[layer, m] = rank.backward(
            layer, rank.activations.pop((layer, m)), rank.grad_activations.pop((layer + 1, m)), weight
        )
        return grad_weight

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        rank = self.rank
        rank.grad_activations[layer, m] = rank.backward_input(
            layer, rank.activations[layer, m], rank.grad_activations[layer + 1, m], weight
        )

    def backward_weight(self, layer: int, m: int) -> Value:
        rank = self.rank
        return rank.backward_weight(layer, rank.activations.pop((layer, m)), rank.grad_activations.pop((layer + 1, m)))


class Halves:
    """Half-blocks: bodies sliced over `tp`, norms on every rank, or on slices of the sequence.

    An attention's body may be two layers, a projection and a row, and sequences cut over `cp` (see `Attention`).

    Without sequence parallelism a body's terms are all-reduced, in either direction; with it they are reduce-scattered
    along the sequence and what the next body reads is all-gathered (Korthikanti et al. 2022, arXiv 2205.05198, fig. 5).
    """

    def __init__(self, rank: Rank, plan: Plan) -> None:
        self.rank = rank
        self.sliced = plan.mesh.tp > 1
        self.sequence = plan.sequence_parallel
        self.attention = Attention(rank, plan)

    async def forward(self, layer: int, m: int, weight: Value, keeps: Keeps) -> None:
        rank, save = self.rank, keeps == "all"
        take = rank.activations.pop if keeps == "nothing" else rank.activations.__getitem__
        if rank.kinds[layer] is LayerKind.NORM:
            residual = self._residual(layer, m, keeps)
            handed_on, normalised = rank.forward_norm(layer, residual, take((layer, m)), weight, save=save)
            if handed_on is not None:
                rank.residuals[rank.sizes.next_carrying(layer), m] = handed_on
            rank.activations[layer + 1, m] = await self._whole(normalised)
        elif rank.kinds[layer] is LayerKind.PROJECT:
            made = rank.project(layer, take((layer, m)), weight, save=save)
            await self.attention.forward(layer, m, *made, keeps=save)
        else:
            terms = rank.forward(layer, take((layer, m)), weight, save=save)
            is_head = layer == rank.layers[-1]
            rank.activations[layer + 1, m] = terms if is_head else await self._reduced(terms)

    def _residual(self, layer: int, m: int, keeps: Keeps) -> Value | None:
        """Take the residual that the norm before has handed on.

        Keep it if it is the input of what is computed again.
        """
        if layer == 1:
            return None
        return self.rank.residuals[layer, m] if keeps == "input" else self.rank.residuals.pop((layer, m))

    async def loss(self, m: int) -> None:
        rank, last = self.rank, len(self.rank.layers)
        logits = rank.activations[last, m]
        stats = await rank.all_gather(rank.loss_stats(logits), axis="tp") if self.sliced else None
        rank.grad_activations[last, m] = rank.loss(rank.activations.pop((last, m)), stats)

    async def backward(self, layer: int, m: int, weight: Value) -> Value:
        rank, grads = self.rank, self.rank.grad_activations
        if rank.kinds[layer] is LayerKind.PROJECT:
            grad_weight, terms = await self.attention.backward(layer, m, weight)
            await self._keep(layer, m, terms)
            return grad_weight
        if layer and rank.kinds[layer - 1] is LayerKind.PROJECT:
            self.attention.keep(layer - 1, m)
        x, gradient = rank.activations.pop((layer, m)), grads.pop((layer + 1, m))
        if rank.kinds[layer] is LayerKind.NORM:
            above = self._from_above(layer, m)
            grad_weight, grads[layer, m], below = rank.backward_norm(layer, x, gradient, above, weight)
            self._hand_down(layer, m, below)
        else:
            grad_weight, terms = rank.backward(layer, x, await self._of_output(layer, gradient), weight)
            await self._keep(layer, m, terms)
        return grad_weight

    async def backward_input(self, layer: int, m: int, weight: Value) -> None:
        rank, grads = self.rank, self.rank.grad_activations
        if rank.kinds[layer] is LayerKind.PROJECT:
            await self._keep(layer, m, await self.attention.backward_input(layer, m, weight))
            return
        if layer and rank.kinds[layer - 1] is LayerKind.PROJECT:
            self.attention.keep(layer - 1, m)
        x = rank.activations[layer, m]
        if rank.kinds[layer] is LayerKind.NORM:
            above = self._from_above(layer, m)
            grads[layer, m], below = rank.backward_norm_input(layer, x, grads[layer + 1, m], above, weight)
            self._hand_down(layer, m, below)
        else:
            grads[layer + 1, m] = await self._of_output(layer, grads[layer + 1, m])
            await self._keep(layer, m, rank.backward_input(layer, x, grads[layer + 1, m], weight))

    def backward_weight(self, layer: int, m: int) -> Value:
        rank = self.rank
        if rank.kinds[layer] is LayerKind.PROJECT:
            return self.attention.backward_weight(layer, m)
        return rank.backward_weight(layer, rank.activations.pop((layer, m)), rank.grad_activations.pop((layer + 1, m)))

    def _from_above(self, layer: int, m: int) -> Value | None:
        after = self.rank.sizes.next_carrying(layer)
        return self.rank.grad_residuals.pop((after, m)) if after >= 0 else None

    def _hand_down(self, layer: int, m: int, grad_residual: Value | None) -> None:
        if grad_residual is not None:
            self.rank.grad_residuals[layer, m] = grad_residual

    async def _of_output(self, layer: int, gradient: Value) -> Value:
        return gradient if layer == self.rank.layers[-1] else await self._whole(gradient)

    async def _keep(self, layer: int, m: int, made: Value) -> None:
        """The gradient of a body's input: the sum of terms, or a row's slices, which attention takes as they are."""
        as_it_is = layer == 0 or self.rank.kinds[layer] is LayerKind.ROW  # tokens' gradient is nobody's
        self.rank.grad_activations[layer, m] = made if as_it_is else await self._reduced(made)

    async def _reduced(self, terms: Value) -> Value:
        if self.sequence:
            return await self.rank.reduce_scatter(terms, axis="tp")
        return await self.rank.all_reduce(terms, axis="tp") if self.sliced else terms

    async def _whole(self, value: Value) -> Value:
        return await self.rank.all_gather(value, axis="tp") if self.sequence else value


def computing(rank: Rank, plan: Plan) -> Compute:
    """Choose the computation that suits the model's layers."""
    if LayerKind.EXPERTS in rank.kinds:
        return Mixture(rank, plan)
    return Halves(rank, plan) if LayerKind.NORM in rank.kinds else Whole(rank, plan)
