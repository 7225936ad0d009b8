"""Arithmetic of a mixture of experts: route, assign slots, dispatch, compute, combine.

Each microbatch is routed separately. The slots of the experts' buffers are filled by the first choices of all tokens,
in order, then by the second choices, and so on (Lepikhin et al. 2020, arXiv 2006.16668, algorithm 1). So every strategy
drops the same tokens.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from shardlab.language.rules.kinds import bits
from shardlab.models.mixture import Router
from shardlab.models.tensors.share import Share


def route(router: Router, weight: Tensor, x: Tensor, share: Share) -> tuple[Tensor, Tensor]:
    """Choose the experts of every token of `x` (rows, T, C), and return their weights and numbers (rows, T, top_k).

    Among equal scores, the lower number wins.

    The backward pass of the gates adds the gradient of the auxiliary loss, averaged over the step's microbatches. The
    loss of a microbatch is experts * sum over experts of (the expert's share of the choices) * (its mean probability),
    which is 1 if the load is balanced (Fedus et al. 2021, arXiv 2101.03961, eq. 4 to 6, with all top_k choices). If
    the experts are divided among ranks, each rank adds the terms of its experts.
    """
    apply = cast("Callable[..., tuple[Tensor, Tensor]]", _Choose.apply)
    return apply(router_scores(x, weight), router, share)


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """Return the scores (..., experts) of tokens (..., C), in float32 or float64; the weight is (experts, C)."""
    exact = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(exact), weight.to(exact))


def choose_experts(scores: Tensor, top_k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Turn scores (..., experts) into gates and choices (int32), both (..., top_k), and the experts' probabilities."""
    probabilities = scores.softmax(-1)
    choices = probabilities.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    gates = probabilities.gather(-1, choices)
    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
    return gates, choices.to(torch.int32), probabilities


def scores_gradient(router: Router, share: Share, gradient: Tensor, probabilities: Tensor, choices: Tensor) -> Tensor:
    """Return the scores' gradient from that of the gates, plus that of the auxiliary loss (see `route`)."""
    gradient, choices = gradient.to(probabilities.dtype), choices.long()
    top = probabilities.gather(-1, choices)
    if choices.shape[-1] > 1:  # gates = top / total
        total = top.sum(-1, keepdim=True)
        gradient = (gradient - (gradient * top).sum(-1, keepdim=True) / total) / total
    grad_probabilities = torch.zeros_like(probabilities).scatter_(-1, choices, gradient)
    auxiliary, local = router.auxiliary * share.gradient_scale / share.step_microbatches, local_experts(router, share)
    parts = zip(grad_probabilities.chunk(share.microbatches), choices.chunk(share.microbatches), strict=True)
    for part, part_choices in parts:
        experts, tokens = part.shape[-1], part_choices[..., 0].numel()
        part[..., local] += auxiliary * experts / tokens * _shares(part_choices, part)[local]
    mean = (grad_probabilities * probabilities).sum(-1, keepdim=True)
    return probabilities * (grad_probabilities - mean)


def local_experts(router: Router, share: Share) -> list[int]:
    """Return the numbers of the experts to which a rank sends tokens, or whose results it has."""
    experts_per_part = router.experts // share.experts.of
    return [part * experts_per_part + expert for part in bits(share.experts.mask) for expert in range(experts_per_part)]


class _Choose(torch.autograd.Function):
    """Function from scores to gates and choices. The backward pass adds the gradient of the auxiliary loss."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, router: Router, share: Share) -> tuple[Tensor, Tensor]:
        gates, choices, probabilities = choose_experts(scores, router.top_k)
        ctx.mark_non_differentiable(choices)
        ctx.save_for_backward(probabilities, choices)
        ctx.router, ctx.share = router, share
        return gates, choices

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return scores_gradient(ctx.router, ctx.share, gradients[0], *ctx.saved_tensors), None, None


def assign_slots(router: Router, choices: Tensor, share: Share) -> Tensor:
    """Assign a slot in the local experts' buffers to each choice.

    Args:
        router: the router, which sets each expert's slots for a microbatch (`capacity`).
        choices: (rows, T, top_k).
        share: the share, which has the local experts.

    Returns:
        Slots of the same shape, int32, counted over all microbatches; -1 if the expert is full or not local.
    """
    slots: list[Tensor] = []
    local = local_experts(router, share)
    places = torch.full((router.experts,), -1, device=choices.device)
    places[local] = torch.arange(len(local), device=choices.device)
    for microbatch, part in enumerate(choices.long().chunk(share.microbatches)):
        capacity = router.capacity(part[..., 0].numel())
        in_turn = part.flatten(0, -2).t().flatten()  # first choices of all tokens, then second ones
        earlier = F.one_hot(in_turn, router.experts).cumsum(0).gather(1, in_turn[:, None])[:, 0] - 1
        place = places[in_turn]
        slot = (microbatch * len(local) + place) * capacity + earlier
        slot = slot.masked_fill((earlier >= capacity) | (place < 0), -1)
        slots.append(slot.view(router.top_k, -1).t().reshape(part.shape))
    return torch.cat(slots).to(torch.int32)


def dispatch(router: Router, x: Tensor, slots: Tensor, share: Share) -> Tensor:
    """Copy tokens (..., C) to their slots in buffers (microbatches * experts, capacity, C) that are zero elsewhere."""
    capacity = router.capacity(x[..., 0].numel() // share.microbatches)
    return scatter_to_slots(x.flatten(0, -2), slots, (share.microbatches * len(local_experts(router, share)), capacity))


def combine(buffers: Tensor, gates: Tensor, slots: Tensor) -> Tensor:
    """Sum each token's results (..., C), weighted by its gates. A choice without a slot adds nothing."""
    return (gather_slots(buffers, slots) * gates[..., None].to(buffers.dtype)).sum(-2)


def scatter_to_slots(values: Tensor, slots: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return buffers (*shape, C) with the values (tokens or choices, C) in their slots.

    No two choices have the same slot.
    """
    count = slots.numel()
    slot_count, choice_numbers = shape[0] * shape[1], torch.arange(count, device=slots.device)
    source = choice_numbers.new_full((slot_count + 1,), -1)  # the last place is for choices without a slot
    source[torch.where(slots < 0, slot_count, slots).flatten().long()] = choice_numbers
    buffers = values[source[:-1].clamp_min(0) // (count // len(values))]
    return buffers.masked_fill_((source[:-1] < 0)[:, None], 0).view(*shape, -1)


def gather_slots(buffers: Tensor, slots: Tensor) -> Tensor:
    """Return the buffers' values in the slots, (..., top_k, C); zero for a choice without a slot."""
    values = buffers.flatten(0, 1)[slots.long().clamp_min(0)]
    return values.masked_fill_((slots < 0)[..., None], 0)


def expert_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Apply each expert's linear map to its buffers, one microbatch at a time.

    Args:
        x: (microbatches * experts, capacity, inputs).
        weight: (experts, outputs, inputs).
        bias: (experts, outputs), padded with zeros if it is sliced (`pad_bias`); None for no bias.
    """
    output = torch.cat([torch.bmm(part, weight.transpose(1, 2)) for part in torch.split(x, len(weight))])
    if bias is not None:
        output.view(-1, *bias.shape[:1], *output.shape[1:]).add_(bias[:, None])
    return output


def pad_bias(bias: Tensor, share: Share) -> Tensor:
    """Pad a slice's bias (experts, features of the slice) with zeros, so that the sum over slices is the whole bias."""
    number, of = share.piece("ffn")
    return F.pad(bias, (number * bias.shape[1], (of - 1 - number) * bias.shape[1]))


def _shares(choices: Tensor, like: Tensor) -> Tensor:
    """Return each expert's share of one microbatch's choices, (experts,)."""
    return F.one_hot(choices.flatten(), like.shape[-1]).sum(0).to(like.dtype) / choices.numel()
