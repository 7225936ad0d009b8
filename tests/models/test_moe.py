"""Mixtures of experts: sizes, capacity, and how they are cut for expert parallelism."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlab.errors import UserError
from shardlab.models import GPT, Mixtral, MoE, cut
from shardlab.models.attention import Attend
from shardlab.models.cutting import cut_for
from shardlab.models.mixture import Combine, Dispatch, Place, Route
from shardlab.program import Mesh
from tests.models.conftest import piece_of
from tests.models.small import WithHeads

SMALL: WithHeads = {"layers": 2, "hidden_size": 16, "heads": 4, "vocab_size": 40, "seq_len": 12}


def test_every_mlp_becomes_as_many_experts_of_its_size_and_a_router() -> None:
    gpt, moe = GPT(**SMALL), MoE(experts=5, **SMALL)
    mlp = 2 * 16 * 64 + 64 + 16
    assert moe.parameter_count - gpt.parameter_count == 2 * (4 * mlp + 5 * 16)


@pytest.mark.parametrize("mesh", [Mesh(), Mesh(ep=2), Mesh(ep=2, tp=2), Mesh(ep=2, cp=2)], ids=str)
def test_shared_experts_are_one_that_is_so_many_times_as_wide_and_whole_on_every_rank(mesh: Mesh) -> None:
    without, three = (cut_for(MoE(shared_experts=count, **SMALL), mesh) for count in (0, 3))
    mlp = 2 * 16 * 3 * 64 + 3 * 64 + 16
    assert three.parameter_count - without.parameter_count == 2 * mlp
    flops = [sum(model.forward_flops(layer) for layer in range(model.layers)) for model in (without, three)]
    assert flops[1] - flops[0] == 2 * 2 * 12 * 2 * 16 * 3 * 64
    shared = [l for l in range(three.layers) if any("shared" in p.name for p in three.layout(l).parameters)]
    assert [three.layout(l).slices for l in shared] == [1, 1]


@given(st.integers(1, 200), st.integers(1, 8), st.floats(0.1, 4), st.data())
def test_capacity_is_enough_for_balanced_tokens_from_a_factor_of_1_on(
    tokens: int, experts: int, factor: float, data: st.DataObject
) -> None:
    top_k = data.draw(st.integers(1, experts))
    router = MoE(experts=experts, top_k=top_k, capacity_factor=factor).router
    assert 1 <= router.capacity(tokens) <= tokens
    if factor >= 1:
        assert router.capacity(tokens) * experts >= top_k * tokens
    dropless = MoE(experts=experts, top_k=top_k, capacity_factor=None).router
    assert dropless.capacity(tokens) == tokens


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_expert_layers_have_the_whole_models_parameters(slices: int) -> None:
    whole = MoE(**SMALL)
    model = cut(whole, ep=slices)
    assert sum(model.layout(layer).parameter_count for layer in range(model.layers)) == whole.parameter_count
    assert [layer.cut for layer in model.signatures] == [(), ("expert",)] * 2 + [()]
    assert [layer.carries for layer in model.signatures] == [True, False] * 2 + [True]
    assert [model.layout(layer).slices for layer in range(5)] == [1, slices, 1, slices, 1]


def test_flops_are_those_of_the_whole_model() -> None:
    whole = MoE(**SMALL)
    model = cut(whole, ep=2)
    layers = sum(model.forward_flops(layer) for layer in range(model.layers))
    assert layers == sum(whole.forward_flops(layer) for layer in range(whole.layers))


def test_dropless_buffers_have_room_for_every_token_at_every_expert() -> None:
    sizes = cut(MoE(experts=4, capacity_factor=None, **SMALL), ep=2).sizes(rows=3, element_bytes=4)
    assert sizes.activations[1] == sizes.activations[2] == 4 * (3 * 12) * 16
    assert (sizes.residual, sizes.routing) == (3 * 12 * 16, 3 * 12 * 2 * 2)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("capacity_factor", [None, 0.7])
@pytest.mark.parametrize("top_k", [1, 3])
def test_what_autograd_keeps_is_what_the_model_declares(
    saved_bytes: Callable[..., int], dropout: float, capacity_factor: float | None, top_k: int
) -> None:
    kind, shared = (MoE, 0) if top_k == 1 else (Mixtral, 2)
    whole = kind(top_k=top_k, dropout=dropout, capacity_factor=capacity_factor, shared_experts=shared, **SMALL)
    for layer in range(whole.layers):
        assert saved_bytes(whole, layer, 3, torch.float32) == 4 * whole.microbatch_saved(layer, 3), f"block {layer}"
    for tp, ep in ((1, 1), (1, 2), (2, 1), (2, 2)):
        model = cut(whole, tp=tp, ep=ep)
        for layer, run in enumerate(model.runs):
            shares = [piece_of(model, layer, number) for number in range(run.slices)]
            kept = [saved_bytes(model, layer, 3, torch.float32, share) for share in shares]
            assert sum(kept) == 4 * model.microbatch_saved(layer, 3), f"layer {layer}"
            assert len(set(kept)) == 1


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"experts": 0}, "experts is 0"),
        ({"experts": 300}, "256 at most"),
        ({"shared_experts": -1}, "shared_experts is -1; there may be 0 or more"),
        ({"top_k": 5}, "top_k is 5, but there are 4 experts"),
        ({"capacity_factor": 0.0}, "capacity_factor is 0.0; give a positive number"),
        ({"auxiliary": -1.0}, "auxiliary is -1.0"),
    ],
)
def test_impossible_mixtures_are_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        MoE(**SMALL, **fields)


def test_what_cannot_be_cut_is_refused() -> None:
    with pytest.raises(UserError, match=r"4 experts do not divide into 3 .* \(remainder 1\)"):
        cut(MoE(**SMALL), ep=3)
    with pytest.raises(UserError, match=r"4 heads do not divide into 3 tensor-parallel slices \(remainder 1\)"):
        cut(MoE(**SMALL), tp=3)
    with pytest.raises(UserError, match=r"cut into 1 x 0 slices \(tp x ep\)"):
        cut(MoE(**SMALL), ep=0)


def test_a_mixture_follows_every_blocks_attention() -> None:
    model = MoE(**SMALL)
    for layer in range(model.layers):
        primitives = [type(step.primitive) for step in model.run(layer).steps]
        assert primitives.index(Attend) < primitives.index(Route) < primitives.index(Combine)
        assert [primitives.count(each) for each in (Route, Place, Dispatch, Combine)] == [1, 1, 1, 1]
