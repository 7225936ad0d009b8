"""A mixture of experts against its definition, token by token, with autograd's own gradients."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shardlab.language.rules.kinds import Holds
from shardlab.models import CutModel, MoE, cut
from shardlab.models.mixture import Router, mixture
from shardlab.models.primitives import Primitive
from shardlab.models.tensors import (
    Dropout,
    Share,
    cross_entropy,
    initial_weights,
    make_layers,
    parameter_views,
    to_blocks,
    to_layers,
)
from shardlab.models.tensors.compute import Operands, compute
from shardlab.models.tensors.mixture import assign_slots, combine, dispatch, route
from tests.models.tensors.comparing import error, fill_gradient, gradient_of, random_batch, random_flats, whole_step
from tests.support.thorough import examples

ROUTER = Router(hidden_size=8, experts=4, top_k=2, capacity_factor=1.25, auxiliary=0.5)


def steps_of(router: Router) -> tuple[Primitive, ...]:
    """A mixture of experts for sequences of 6 tokens."""
    return mixture(6, router, 32, True, "gelu")


def parameters_of(router: Router, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        p.name: torch.randn(p.shape, dtype=torch.float64, generator=generator).requires_grad_()
        for step in steps_of(router)
        for p in step.parameters()
    }


def branch_of(router: Router, p: Mapping[str, Tensor], x: Tensor, share: Share) -> Tensor:
    """Return the branch of a mixture for its tokens."""
    tensors = {"x": x}
    for step in steps_of(router):
        tensors |= zip(step.makes, compute(step, Operands(p, tensors, share)), strict=True)
    return tensors["x"]


def by_definition(router: Router, p: Mapping[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return the branch, the auxiliary loss, and the number of dropped choices of one microbatch's tokens (N, C)."""
    probabilities = F.linear(x, p["mlp.router.weight"]).softmax(-1)
    order: list[list[int]] = [
        row.argsort(descending=True, stable=True).tolist() for row in probabilities
    ]  # the lower expert first
    load = [0] * router.experts
    branch = [torch.zeros(router.hidden_size, dtype=x.dtype) for _ in x]
    dropped = 0
    for turn in range(router.top_k):
        for n, token in enumerate(x):
            e = order[n][turn]
            if load[e] == router.capacity(len(x)):
                dropped += 1
                continue
            load[e] += 1
            whole = probabilities[n, order[n][: router.top_k]].sum() if router.top_k > 1 else 1
            hidden = p["mlp.experts.c_fc.weight"][e] @ token + p["mlp.experts.c_fc.bias"][e]
            output = p["mlp.experts.c_proj.weight"][e] @ F.gelu(hidden) + p["mlp.experts.c_proj.bias"][e]
            branch[n] = branch[n] + probabilities[n, e] / whole * output
    shares = [
        sum(e in choices[: router.top_k] for choices in order) / (len(x) * router.top_k) for e in range(router.experts)
    ]
    balance = router.experts * sum(share * probabilities[:, e].mean() for e, share in enumerate(shares))
    return torch.stack(branch), torch.as_tensor(balance), dropped


@pytest.mark.parametrize("capacity_factor", [None, 1.0, 0.4])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_a_mixture_equals_its_definition_in_result_and_gradients(top_k: int, capacity_factor: float | None) -> None:
    router = replace(ROUTER, top_k=top_k, capacity_factor=capacity_factor)
    p, reference = parameters_of(router), parameters_of(router)
    x = torch.randn(6, 6, 8, dtype=torch.float64)  # three microbatches of two sequences
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    weights = torch.randn_like(x)

    branch = branch_of(router, p, ours, Share(microbatches=3, step_microbatches=5))
    (branch * weights).sum().backward()

    total = torch.zeros((), dtype=torch.float64)
    for microbatch, output, w in zip(theirs.chunk(3), branch.chunk(3), weights.chunk(3), strict=True):
        expected, balance, dropped = by_definition(router, reference, microbatch.flatten(0, 1))
        assert (dropped == 0) if capacity_factor is None else (dropped > 0 or capacity_factor >= 1)
        assert error(output.detach().flatten(0, 1), expected.detach()) <= 1e-12
        total = total + (expected * w.flatten(0, 1)).sum() + router.auxiliary / 5 * balance
    total.backward()
    assert error(gradient_of(ours), gradient_of(theirs)) <= 1e-12
    for name in p:
        assert error(gradient_of(p[name]), gradient_of(reference[name])) <= 1e-12, name


@settings(deadline=None, max_examples=examples(30))
@given(st.integers(1, 3), st.integers(1, 4), st.sampled_from([None, 0.3, 0.8, 1.25]), st.integers(0, 99))
def test_slots_are_given_in_turn_until_an_experts_capacity_is_used_up(
    microbatches: int, top_k: int, capacity_factor: float | None, seed: int
) -> None:
    router = replace(ROUTER, top_k=top_k, capacity_factor=capacity_factor)
    generator = torch.Generator().manual_seed(seed)
    choices = torch.rand(microbatches * 2, 6, 4, generator=generator).argsort(-1)[..., :top_k]
    slots = assign_slots(router, choices, Share(microbatches=microbatches))
    capacity = router.capacity(12)
    for m, (slot_part, choice_part) in enumerate(
        zip(slots.chunk(microbatches), choices.chunk(microbatches), strict=True)
    ):
        in_turn = list(zip(slot_part.flatten(0, 1).t().flatten(), choice_part.flatten(0, 1).t().flatten(), strict=True))
        for expert in range(4):
            places = [int(slot) for slot, e in in_turn if e == expert]
            first = (m * 4 + expert) * capacity
            assert places == [*range(first, first + min(len(places), capacity)), *[-1] * (len(places) - capacity)]
    x = torch.randn(microbatches * 2, 6, 8)
    buffers = dispatch(router, x, slots, Share(microbatches=microbatches))
    assert buffers.shape == (microbatches * 4, capacity, 8)
    assert buffers.untyped_storage().nbytes() == 4 * buffers.numel()


@pytest.mark.parametrize("parts", [(0b0011, 0b1100), (0b0110, 0b1001), (0b0100, 0b1010, 0b0001)])
def test_any_parts_of_the_experts_make_terms_of_each_tokens_result(parts: tuple[int, ...]) -> None:
    weight, x = parameters_of(ROUTER)["mlp.router.weight"], torch.randn(6, 6, 8, dtype=torch.float64)
    shares = [Share(microbatches=3, experts=Holds(part, 4)) for part in (0b1111, *parts)]
    whole, *terms = (
        combine(dispatch(ROUTER, x, slots, share).square(), gates, slots)
        for share in shares
        for gates, choices in [route(ROUTER, weight, x, share)]
        for slots in [assign_slots(ROUTER, choices, share)]
    )
    assert error(sum(terms, torch.zeros_like(whole)), whole) <= 1e-12
    assert all(error(term, whole) > 0.1 for term in terms)


def test_equal_scores_go_to_the_lower_expert() -> None:
    weight = torch.zeros(4, 8, dtype=torch.float64)
    gates, choices = route(ROUTER, weight, torch.randn(2, 6, 8, dtype=torch.float64), Share())
    assert choices.unique(dim=1).tolist() == [[[0, 1]], [[0, 1]]]
    assert torch.equal(gates, torch.full_like(gates, 0.5))


def test_the_router_computes_in_float32_at_least() -> None:
    weight = parameters_of(ROUTER)["mlp.router.weight"].detach().bfloat16()
    gates, _ = route(ROUTER, weight, torch.randn(2, 6, 8, dtype=torch.bfloat16), Share())
    assert gates.dtype == torch.float32


# Dense layers and experts, with the exchange played by hand, equal the whole model in loss and gradients.


SMALL = MoE(layers=2, hidden_size=16, heads=4, vocab_size=40, seq_len=12, experts=4, auxiliary=0.5)
MODELS = [
    SMALL,
    replace(SMALL, top_k=1, capacity_factor=0.6, dropout=0.3),
    replace(SMALL, top_k=3, capacity_factor=None, bias=False),
    replace(SMALL, shared_experts=2, dropout=0.3),
]
MICROBATCHES = (3, 5, 6, 8)


def played(model: CutModel, leaves: list[list[list[Tensor]]], tokens: list[Tensor]) -> list[Tensor]:
    """Every rank's logits, of its own microbatch; leaves[layer][slice] are parameters."""
    carried: list[tuple[Tensor, ...]] = [()] * len(tokens)
    xs, share = tokens, Share(step_microbatches=len(tokens))
    for number, (layer, run) in enumerate(zip(make_layers(model), model.runs, strict=True)):
        if not run.cut:
            outputs = [
                layer.run(leaves[number][0], (x, *c), share, Dropout(model.dropout, 1, 2, 99, (m,)))
                for m, c, x in zip(MICROBATCHES, carried, xs, strict=True)
            ]
            xs, carried = [x for x, *_ in outputs], [tuple(values[1:]) for values in outputs]
        else:
            slices = [x.chunk(run.slices) for x in xs]
            dispatched = [torch.cat([parts[rank] for parts in slices]) for rank in range(run.slices)]
            back = [layer.run(leaves[number][rank], (x,))[0].chunk(len(xs)) for rank, x in enumerate(dispatched)]
            xs = [torch.cat([back[rank][i] for rank in range(run.slices)]) for i in range(len(xs))]
    return xs


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("whole", MODELS, ids=str)
def test_sliced_experts_equal_the_whole_model_in_loss_and_gradients(whole: MoE, slices: int) -> None:
    flats, (tokens, targets) = random_flats(whole), random_batch(whole, len(MICROBATCHES), 2)
    share = Share(microbatches=len(MICROBATCHES), step_microbatches=len(MICROBATCHES))
    together = tokens.flatten(0, 1), targets.flatten(0, 1)
    expected, theirs = whole_step(whole, flats, together, MICROBATCHES, share)

    model = cut(whole, ep=slices)
    leaves = [
        [[view.clone().requires_grad_() for view in parameter_views(layout, run)] for run in flat.chunk(layout.slices)]
        for layout, flat in zip(map(model.layout, range(model.layers)), to_layers(model, flats), strict=True)
    ]
    logits = played(model, leaves, list(tokens))
    loss = torch.stack([cross_entropy(part, theirs) for part, theirs in zip(logits, targets, strict=True)]).sum()
    loss.backward()
    assert error(loss.detach(), expected) <= 1e-12

    gradients: list[Tensor] = []
    for layer, slices_of_layer in enumerate(leaves):
        layout = model.layout(layer)
        runs = torch.zeros(layout.slices, layout.run_numel, dtype=torch.float64)
        for run, mine in zip(runs, slices_of_layer, strict=True):
            fill_gradient(run, layout, mine)
        gradients.append(runs.flatten())
    assert all(error(a, b) <= 1e-12 for a, b in zip(to_blocks(model, gradients), theirs, strict=True))


def test_experts_numbers_survive_being_carried_in_bfloat16() -> None:
    whole = MoE(layers=1, hidden_size=16, heads=2, vocab_size=40, seq_len=64, experts=256, top_k=4)
    model = cut(whole)
    parameters = [
        parameter_views(model.layout(layer), initial_weights(model, layer, 0, torch.bfloat16)) for layer in range(3)
    ]
    tokens = torch.randint(40, (2, 64))
    *_, carried = make_layers(model)[0].run(parameters[0], (tokens,))
    numbers = carried[..., -4:].float()
    assert torch.equal(numbers, numbers.round())
    assert numbers.max() > 200
