"""A mixture of experts, step by step: choose, dispatch, compute, combine.

Each microbatch is routed by itself: its tokens are numbered row by row, and places in the experts' buffers are given
to all first choices in the order of tokens, then to the second ones, and so on (Lepikhin et al. 2020, arXiv 2006.16668,
algorithm 1). Every strategy thus drops the same tokens. The steps are autograd functions that keep as little as can be.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.models.mixture import Router
from shardlab.models.tensors.products import Again, Products, add_product
from shardlab.models.tensors.share import Share
from shardlab.rules.pieces import bits


class Routed(NamedTuple):
    """What the router says of tokens (rows, T): their weights and the experts' numbers, both (rows, T, top_k)."""

    gates: Tensor
    choices: Tensor


def route(router: Router, weight: Tensor, x: Tensor, share: Share) -> Routed:
    """Choose for every token of `x` (rows, T, C), in float32 at least; of equal scores the lower number wins.

    The gates' backward pass adds the gradient of the microbatches' auxiliary loss, each with its share of the step:
    experts * sum over experts of (share of the choices that it got) * (its mean probability), which is 1 when balanced
    (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6, with all top_k choices counted where they have one). Where experts
    are shared among ranks, each adds the terms of its own.
    """
    exact = torch.promote_types(x.dtype, torch.float32)
    scores = F.linear(x.to(exact), weight.to(exact))
    auxiliary, here = router.auxiliary * share.loss_scale / share.of_step, experts_here(router, share)
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _Choose.apply)
    return Routed(*apply(scores, router.top_k, auxiliary, share.microbatches, here))


def experts_here(router: Router, share: Share) -> list[int]:
    """The experts that a rank sends tokens to, or has the results of: all, or some parts of them."""
    each = router.experts // share.experts.of
    return [part * each + expert for part in bits(share.experts.mask) for expert in range(each)]


def _shares(choices: Tensor, like: Tensor) -> Tensor:
    """Count the share of each expert in one microbatch's choices, (experts,)."""
    return F.one_hot(choices.flatten(), like.shape[-1]).sum(0).to(like.dtype) / choices.numel()


class _Choose(torch.autograd.Function):
    """From scores (rows, T, experts) to gates and choices; keeps the probabilities and the choices."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, top_k: int, weight: float, microbatches: int, here: list[int]
    ) -> tuple[Tensor, Tensor]:
        probabilities = scores.softmax(-1)
        choices = probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
        gates = probabilities.gather(-1, choices)
        if top_k > 1:
            gates = gates / gates.sum(-1, keepdim=True)
        kept = choices.to(torch.int32)
        ctx.mark_non_differentiable(kept)
        ctx.save_for_backward(probabilities, kept)
        ctx.weight, ctx.microbatches, ctx.here = weight, microbatches, here
        return gates, kept

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        probabilities, choices = ctx.saved_tensors
        gradient, choices = gradients[0], choices.long()
        chosen = probabilities.gather(-1, choices)
        if choices.shape[-1] > 1:  # gates = chosen / total
            total = chosen.sum(-1, keepdim=True)
            gradient = (gradient - (gradient * chosen).sum(-1, keepdim=True) / total) / total
        of_probabilities = torch.zeros_like(probabilities).scatter_(-1, choices, gradient)
        for mine, its in zip(of_probabilities.chunk(ctx.microbatches), choices.chunk(ctx.microbatches), strict=True):
            experts, tokens = mine.shape[-1], its[..., 0].numel()
            mine[..., ctx.here] += ctx.weight * experts / tokens * _shares(its, mine)[ctx.here]
        mean = (of_probabilities * probabilities).sum(-1, keepdim=True)
        return probabilities * (of_probabilities - mean), None, None, None, None


def slots_of(router: Router, choices: Tensor, share: Share) -> Tensor:
    """Where each choice (rows, T, top_k) goes in the buffers of the experts here (capacity places for a microbatch).

    Of the same shape, int32, counted over all microbatches; -1 where the expert has no place left, or is not here.
    """
    slots: list[Tensor] = []
    here = experts_here(router, share)
    places = torch.full((router.experts,), -1, device=choices.device)
    places[here] = torch.arange(len(here), device=choices.device)
    for microbatch, its in enumerate(choices.long().chunk(share.microbatches)):
        capacity = router.capacity(its[..., 0].numel())
        in_turn = its.flatten(0, -2).t().flatten()  # first choices of all tokens, then second ones
        earlier = F.one_hot(in_turn, router.experts).cumsum(0).gather(1, in_turn[:, None])[:, 0] - 1
        place = places[in_turn]
        slot = (microbatch * len(here) + place) * capacity + earlier
        slot = slot.masked_fill((earlier >= capacity) | (place < 0), -1)
        slots.append(slot.view(router.top_k, -1).t().reshape(its.shape))
    return torch.cat(slots).to(torch.int32)


def dispatch(router: Router, x: Tensor, slots: Tensor, share: Share) -> Tensor:
    """The experts' buffers (microbatches * experts, capacity, C) with tokens (rows, T, C) in their slots, else zero."""
    capacity = router.capacity(x[..., 0].numel() // share.microbatches)
    return cast(Tensor, _Dispatch.apply(x, slots, (share.microbatches * len(experts_here(router, share)), capacity)))


class _Dispatch(torch.autograd.Function):
    """Keeps the slots alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, shape: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(slots)
        return _scattered(x.flatten(0, -2), slots, shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,), (slots,) = gradients, ctx.saved_tensors
        return _gathered(gradient, slots).sum(-2), None, None


def combine(buffers: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
    """Each token's results (rows, T, C), weighted by its gates; a choice without a slot adds nothing."""
    return cast(Tensor, _Combine.apply(buffers, gates, slots))


class _Combine(torch.autograd.Function):
    """Keeps what it is given."""

    @staticmethod
    def forward(ctx: Any, buffers: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
        ctx.save_for_backward(buffers, gates, slots)
        return (_gathered(buffers, slots) * gates[..., None].to(buffers.dtype)).sum(-2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,), (buffers, gates, slots) = gradients, ctx.saved_tensors
        weighted = gradient[..., None, :] * gates[..., None].to(gradient.dtype)
        of_gates = (_gathered(buffers, slots) * gradient[..., None, :]).sum(-1).to(gates.dtype)
        return _scattered(weighted.flatten(0, -2), slots, buffers.shape[:2]), of_gates, None


def _scattered(values: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Buffers (*shape, C) with values (tokens or choices, C) in the slots of their choices; no two have the same."""
    count = slots.numel()
    size, choices = shape[0] * shape[1], torch.arange(count, device=slots.device)
    source = choices.new_full((size + 1,), -1)  # the last place takes what has no slot
    source[torch.where(slots < 0, size, slots).flatten().long()] = choices
    found = values[source[:-1].clamp_min(0) // (count // len(values))]
    return found.masked_fill_((source[:-1] < 0)[:, None], 0).view(*shape, -1)


def _gathered(buffers: Tensor, slots: Tensor) -> Tensor:
    """What lies in the slots, (rows, T, top_k, C); zero for none."""
    found = buffers.flatten(0, 1)[slots.long().clamp_min(0)]
    return found.masked_fill_((slots < 0)[..., None], 0)


def expert_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, products: Products | None = None, again: Again | None = None
) -> Tensor:
    """Buffers (microbatches * experts, capacity, inputs) through each expert's linear map; see `_ExpertLinear`.

    Args:
        weight: (experts, outputs, inputs).
        bias: (experts, outputs); of a slice of the outputs, with zeros for the others.
        products, again: as for `linear`.
    """
    apply = cast("Callable[..., Tensor]", _ExpertLinear.apply)
    if products is None or not products.takes(weight):
        return apply(x, weight, bias)
    made = apply(x, weight.detach(), bias)
    products.watch(made, x, again, (weight,), _add_of_experts)
    return made


def _add_of_experts(gradient: Tensor, x: Tensor, rooms: Sequence[Tensor]) -> None:
    for part, its in zip(torch.split(gradient, len(rooms[0])), torch.split(x, len(rooms[0])), strict=True):
        add_product(rooms[0], part.transpose(1, 2), its)


class _ExpertLinear(torch.autograd.Function):
    """A linear map for each expert, on one microbatch after the other: its parameters enter the graph at one node.

    x is (microbatches * experts, capacity, inputs), the weight (experts, outputs, inputs), the bias (experts, outputs).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        outputs = [torch.bmm(part, weight.transpose(1, 2)) for part in torch.split(x, len(weight))]
        made = torch.cat(outputs)
        if bias is not None:
            made.view(-1, *bias.shape[:1], *made.shape[1:]).add_(bias[:, None])
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (x, weight) = gradients, ctx.saved_tensors
        of_x = of_weight = of_bias = None
        parts = torch.split(gradient, len(weight))
        if ctx.needs_input_grad[0]:
            of_x = torch.cat([torch.bmm(part, weight) for part in parts])
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight)
            for part, its in zip(parts, torch.split(x, len(weight)), strict=True):
                of_weight.baddbmm_(part.transpose(1, 2), its)
        if ctx.needs_input_grad[2]:
            of_bias = gradient.view(-1, len(weight), *gradient.shape[1:]).sum((0, 2))
        return of_x, of_weight, of_bias
