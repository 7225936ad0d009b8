"""A mixture of experts, step by step: choose, dispatch, compute, combine.

Each microbatch is routed by itself: its tokens are numbered row by row, and places in the experts' buffers are given
to all first choices in the order of tokens, then to the second ones, and so on (Lepikhin et al. 2020, arXiv 2006.16668,
algorithm 1). Every strategy thus drops the same tokens.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.language.rules.kinds import bits
from shardlab.models.mixture import Router
from shardlab.models.tensors.share import Share


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
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _Choose.apply)
    return Routed(*apply(scores_of(x, weight), router, share))


def scores_of(x: Tensor, weight: Tensor) -> Tensor:
    """Each expert's score for tokens (..., C), by the router's weight (experts, C): (..., experts), exact."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(exact), weight.to(exact))


def chosen(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """From scores (..., experts) to gates and choices (..., top_k; int32), and the probabilities of all experts."""
    probabilities = scores.softmax(-1)
    choices = probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    gates = probabilities.gather(-1, choices)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, choices.to(torch.int32), probabilities


def scores_gradient(router: Router, share: Share, gradient: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
    """Turn the gradient of the gates into that of the scores, and add the auxiliary loss's (see `route`)."""
    gradient, choices = gradient.to(probabilities.dtype), choices.long()
    taken = probabilities.gather(-1, choices)
    if choices.shape[-1] > 1:  # gates = taken / total
        total = taken.sum(-1, keepdim=True)
        gradient = (gradient - (gradient * taken).sum(-1, keepdim=True) / total) / total
    of_probabilities = torch.zeros_like(probabilities).scatter_(-1, choices, gradient)
    auxiliary, here = router.auxiliary * share.gradient_scale / share.of_step, experts_here(router, share)
    parts = zip(of_probabilities.chunk(share.microbatches), choices.chunk(share.microbatches), strict=True)
    for mine, its in parts:
        experts, tokens = mine.shape[-1], its[..., 0].numel()
        mine[..., here] += auxiliary * experts / tokens * _shares(its, mine)[here]
    mean = (of_probabilities * probabilities).sum(-1, keepdim=True)
    return probabilities * (of_probabilities - mean)


def experts_here(router: Router, share: Share) -> list[int]:
    """The experts that a rank sends tokens to, or has the results of: all, or some parts of them."""
    each = router.experts // share.experts.of
    return [part * each + expert for part in bits(share.experts.mask) for expert in range(each)]


def _shares(choices: Tensor, like: Tensor) -> Tensor:
    """Count the share of each expert in one microbatch's choices, (experts,)."""
    return F.one_hot(choices.flatten(), like.shape[-1]).sum(0).to(like.dtype) / choices.numel()


class _Choose(torch.autograd.Function):
    """From scores to gates and choices; the auxiliary loss has its gradient here."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, router: Router, share: Share) -> tuple[Tensor, Tensor]:
        gates, choices, probabilities = chosen(scores, router.top_k)
        ctx.mark_non_differentiable(choices)
        ctx.save_for_backward(probabilities, choices)
        ctx.router, ctx.share = router, share
        return gates, choices

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return scores_gradient(ctx.router, ctx.share, gradients[0], *ctx.saved_tensors), None, None


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
    """The experts' buffers (microbatches * experts, capacity, C) with tokens (..., C) in their slots, else zero."""
    capacity = router.capacity(x[..., 0].numel() // share.microbatches)
    return scattered(x.flatten(0, -2), slots, (share.microbatches * len(experts_here(router, share)), capacity))


def combine(buffers: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
    """Each token's results (..., C), weighted by its gates; a choice without a slot adds nothing."""
    return (gathered(buffers, slots) * gates[..., None].to(buffers.dtype)).sum(-2)


def scattered(values: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Buffers (*shape, C) with values (tokens or choices, C) in the slots of their choices; no two have the same."""
    count = slots.numel()
    size, choices = shape[0] * shape[1], torch.arange(count, device=slots.device)
    source = choices.new_full((size + 1,), -1)  # the last place takes what has no slot
    source[torch.where(slots < 0, size, slots).flatten().long()] = choices
    found = values[source[:-1].clamp_min(0) // (count // len(values))]
    return found.masked_fill_((source[:-1] < 0)[:, None], 0).view(*shape, -1)


def gathered(buffers: Tensor, slots: Tensor) -> Tensor:
    """What lies in the slots, (..., top_k, C); zero for none."""
    found = buffers.flatten(0, 1)[slots.long().clamp_min(0)]
    return found.masked_fill_((slots < 0)[..., None], 0)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Buffers through each expert's linear map, one microbatch after the other.

    Args:
        x: (microbatches * experts, capacity, inputs).
        weight: (experts, outputs, inputs).
        bias: (experts, outputs); of a slice of the outputs, with zeros for the others.
    """
    made = torch.cat([torch.bmm(part, weight.transpose(1, 2)) for part in torch.split(x, len(weight))])
    if bias is not None:
        made.view(-1, *bias.shape[:1], *made.shape[1:]).add_(bias[:, None])
    return made


def padded_bias(bias: Tensor, share: Share) -> Tensor:
    """A slice's bias (experts, features of the slice) among those of all slices, which each add their part of a sum."""
    number, of = share.piece("ffn")
    return F.pad(bias, (number * bias.shape[1], (of - 1 - number) * bias.shape[1]))
