"""A mixture of experts against its definition, token by token, with autograd's own gradients."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.models import MoE
from shardlab.models.mixture import Mixture
from shardlab.models.tensors import Share
from shardlab.models.tensors.mixture import dispatch, route, slots_of
from shardlab.models.tensors.parts import body_of

PART = MoE(width=8, experts=4, block=6, auxiliary=0.5).mixture


def error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def parameters_of(part: Mixture, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, dtype=torch.float64, generator=generator).requires_grad_()
        for p in part.parameters()
    }


def by_definition(part: Mixture, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Of one microbatch's tokens (N, C): the branch, the auxiliary loss, and how many choices were dropped."""
    probabilities = F.linear(x, p["mlp.router.weight"]).softmax(-1)
    order = [sorted(range(part.experts), key=lambda e, row=row: (-row[e], e)) for row in probabilities.tolist()]
    taken = [0] * part.experts
    branch = [torch.zeros(part.width, dtype=x.dtype) for _ in x]
    dropped = 0
    for turn in range(part.top_k):
        for n, token in enumerate(x):
            e = order[n][turn]
            if taken[e] == part.capacity(len(x)):
                dropped += 1
                continue
            taken[e] += 1
            whole = probabilities[n, order[n][: part.top_k]].sum() if part.top_k > 1 else 1
            hidden = p["mlp.experts.c_fc.weight"][e] @ token + p["mlp.experts.c_fc.bias"][e]
            made = p["mlp.experts.c_proj.weight"][e] @ F.gelu(hidden) + p["mlp.experts.c_proj.bias"][e]
            branch[n] = branch[n] + probabilities[n, e] / whole * made
    shares = [sum(e in chosen[: part.top_k] for chosen in order) / (len(x) * part.top_k) for e in range(part.experts)]
    balance = part.experts * sum(share * probabilities[:, e].mean() for e, share in enumerate(shares))
    return torch.stack(branch), torch.as_tensor(balance), dropped


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 0.4])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_equals_its_definition_in_result_and_gradients(top_k: int, capacity_factor: float | None) -> None:
    part = replace(PART, top_k=top_k, capacity_factor=capacity_factor)
    p, wanted = parameters_of(part), parameters_of(part)
    x = torch.randn(6, 6, 8, dtype=torch.float64)  # three microbatches of two sequences
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn_like(x)

    branch = body_of(part, p, ours, Share(microbatches=3, of_step=5), None)
    (branch * weights).sum().backward()

    total = torch.zeros((), dtype=torch.float64)
    for microbatch, its, w in zip(theirs.chunk(3), branch.chunk(3), weights.chunk(3), strict=True):
        expected, balance, dropped = by_definition(part, wanted, microbatch.flatten(0, 1))
        assert (dropped == 0) if capacity_factor is None else (dropped > 0 or capacity_factor >= 1)
        assert error(its.detach().flatten(0, 1), expected.detach()) <= 1e-12
        total = total + (expected * w.flatten(0, 1)).sum() + part.auxiliary / 5 * balance
    total.backward()
    assert ours.grad is not None
    assert theirs.grad is not None
    assert error(ours.grad, theirs.grad) <= 1e-12
    for name in p:
        if not name.startswith("ln_"):
            mine, its = p[name].grad, wanted[name].grad
            assert mine is not None
            assert its is not None
            assert error(mine, its) <= 1e-12, name


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 0.3, 0.8, 1.25]), st.integers(0, 99))
def test_slots_are_given_in_turn_until_an_experts_capacity_is_used_up(
    microbatches: int, top_k: int, capacity_factor: float | None, seed: int
) -> None:
    part = replace(PART, top_k=top_k, capacity_factor=capacity_factor)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.rand(microbatches * 2, 6, 4, generator=generator).argsort(-1)[..., :top_k]
    slots = slots_of(part, choices, microbatches)
    capacity = part.capacity(12)
    for m, (its, of) in enumerate(zip(slots.chunk(microbatches), choices.chunk(microbatches), strict=True)):
        in_turn = list(zip(its.flatten(0, 1).t().flatten(), of.flatten(0, 1).t().flatten(), strict=True))
        for expert in range(4):
            got = [int(slot) for slot, e in in_turn if e == expert]
            first = (m * 4 + expert) * capacity
            assert got == [*range(first, first + min(len(got), capacity)), *[-1] * (len(got) - capacity)]
    x = torch.randn(microbatches * 2, 6, 8)
    buffers = dispatch(part, x, slots, microbatches)
    assert buffers.shape == (microbatches * 4, capacity, 8)
    assert buffers.untyped_storage().nbytes() == 4 * buffers.numel()


def test_equal_scores_go_to_the_lower_expert() -> None:
    p = parameters_of(PART)
    p["mlp.router.weight"] = torch.zeros(4, 8, dtype=torch.float64)
    routed = route(PART, p, torch.randn(2, 6, 8, dtype=torch.float64), Share())
    assert routed.choices.unique(dim=1).tolist() == [[[0, 1]], [[0, 1]]]
    assert torch.equal(routed.gates, torch.full_like(routed.gates, 0.5))


def test_the_router_computes_in_float32_at_least() -> None:
    half = {name: p.detach().bfloat16() for name, p in parameters_of(PART).items()}
    assert route(PART, half, torch.randn(2, 6, 8, dtype=torch.bfloat16), Share()).gates.dtype == torch.float32
