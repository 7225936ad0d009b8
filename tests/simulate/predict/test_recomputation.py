"""Recomputation inside blocks in whole steps: seconds and bytes, against kernels and collectives counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.language import Kind, Mesh, OpKind
from shardlab.language.precision import find_precision
from shardlab.models import Blocks, Llama
from shardlab.models.architectures import Mixtral
from shardlab.models.layout import FusedAttention, Matmul, Pointwise
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.recipe import Recipe, find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

S, H, F, LAYERS = 1024, 1024, 4096, 6
"""Tokens of a sequence, features, features inside the feed-forward part, and blocks."""

LLAMA = Llama(layers=LAYERS, hidden_size=H, heads=8, ffn_hidden_size=F, seq_len=S, vocab_size=4096)
MIXTURE = Mixtral(
    layers=LAYERS, hidden_size=H, heads=8, ffn_hidden_size=F, seq_len=S, vocab_size=4096, experts=8, top_k=2,
    capacity_factor=1.0,
)  # fmt: skip


def step_of(
    recompute: str, mesh: Mesh | None = None, model: Blocks = LLAMA, sequence_parallel: bool = False
) -> Workload:
    """One microbatch of one sequence on each data-parallel rank, on fused kernels."""
    plan = Plan(mesh or Mesh(), recompute=recompute, sequence_parallel=sequence_parallel, context="all_gather")
    cluster, precision = find_cluster("h100x8"), find_precision("bf16")
    return Workload(plan, model, cluster, plan.data_ranks, 1, precision, recipe=Recipe())


def longer(recompute: str, mesh: Mesh | None = None, model: Blocks = LLAMA, sequence_parallel: bool = False) -> float:
    """Seconds by which a block's backward pass is longer."""
    recomputing, none = (
        step_of(choice, mesh, model, sequence_parallel).estimate().step for choice in (recompute, "none")
    )
    return (recomputing - none) / LAYERS


def test_a_module_takes_its_forward_pass_again() -> None:
    prices = step_of("none").prices
    kernels = [Matmul(S, 2 * F, H), Pointwise("swiglu", 3 * S * F, 5 * S * F), Matmul(S, H, F)]
    assert longer("mlp") == pytest.approx(prices.seconds_of(kernels))
    attention = FusedAttention(1, 8, 8, S, S, H // 8, (S + 1) / (2 * S))
    assert longer("core_attn") == pytest.approx(prices.seconds_of([attention]))
    assert longer("moe") == longer("layernorm") == 0.0


def test_a_policy_takes_again_what_it_does_not_keep() -> None:
    prices = step_of("none").prices
    norm, attention = Pointwise("rms_norm", 2 * S * H, 3 * S * H), FusedAttention(1, 8, 8, S, S, 128, (S + 1) / (2 * S))
    pointwise = [norm, norm, Pointwise("residual", 3 * S * H, 0), Pointwise("swiglu", 3 * S * F, 0)]
    assert longer("minimal_with_context") == pytest.approx(prices.seconds_of(pointwise))
    assert longer("minimal") == pytest.approx(prices.seconds_of([*pointwise, attention]))
    assert longer("save_dot_except_mlp") == pytest.approx(
        prices.seconds_of([*pointwise, attention, Matmul(S, 2 * F, H)])
    )


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_slices_of_a_module_are_summed_again(sequence_parallel: bool) -> None:
    mesh = Mesh(tp=4)
    prices = step_of("none", mesh).prices
    kernels = [Matmul(S, 2 * F // 4, H), Pointwise("swiglu", 3 * S * F / 4, 0), Matmul(S, H, F // 4)]
    sum = prices.collective_time(OpKind.ALL_REDUCE, S * H * 2, mesh.group(0, "tp"))
    assert sum > 0
    seconds = longer("mlp", mesh, sequence_parallel=sequence_parallel)
    assert seconds == pytest.approx(prices.seconds_of(kernels) + sum)


def test_tokens_are_exchanged_again_among_the_ranks_of_experts() -> None:
    """Each rank computes two experts on the tokens of four ranks, 4 x 2 x 1024 / 8 for each expert."""
    mesh, slots, rows = Mesh(ep=4), 2 * S, 1024
    prices = step_of("none", mesh, MIXTURE).prices
    experts = [Matmul(rows, 2 * F, H, 2), Pointwise("swiglu", 2 * rows * 3 * F, 0), Matmul(rows, H, F, 2)]
    permutations = [Pointwise("dispatch", (S + slots) * H, 0), Pointwise("combine", (slots + S) * H, 0)]
    router = [Matmul(S, 8, H), Pointwise("route", 2 * S * 8, 0)]
    exchange = prices.collective_time(OpKind.ALL_TO_ALL, slots * H * 2, mesh.group(0, "ep"))
    assert exchange > 0
    assert longer("moe", mesh, MIXTURE) == pytest.approx(
        prices.seconds_of([*router, *permutations, *experts]) + 2 * exchange
    )
    assert longer("moe_act", mesh, MIXTURE) == pytest.approx(prices.seconds_of(experts[1:2]))


def test_an_attention_that_is_an_op_of_its_own_is_computed_again() -> None:
    """Each of two ranks has the keys and values of the whole sequence, and as much to attend to."""
    kernel = FusedAttention(1, 8, 8, S // 2, S, 128, 0.5)
    assert longer("core_attn", Mesh(cp=2)) == pytest.approx(step_of("none").prices.seconds_of([kernel]), rel=0.01)


@pytest.mark.parametrize(
    ("mesh", "model", "recompute"),
    [
        (Mesh(pp=2, dp_shard=2, tp=2), LLAMA, "mlp"),
        (Mesh(dp_shard=2, cp=2, tp=2), LLAMA, "minimal"),
        (Mesh(dp_shard=2, ep=4), MIXTURE, "layernorm+moe"),
        (Mesh(pp=2, ep=4), MIXTURE, "layernorm+moe_act"),
        (Mesh(tp=2, ep=4), MIXTURE, "save_qkv_proj"),
    ],
)
def test_a_forecast_is_that_of_every_op(mesh: Mesh, model: Blocks, recompute: str) -> None:
    step = replace(step_of(recompute, mesh, model), recipe=find_recipe("megatron-core"))
    step = replace(step, microbatches=2 * step.microbatches * mesh.pp)
    whole, predicted = step.estimate(), forecast(step)
    assert predicted.seconds == pytest.approx(whole.step + whole.seconds_outside_ops, rel=1e-9)
    assert isinstance(step.plan, Plan)
    keeping = replace(step, plan=replace(step.plan, recompute="none"))
    assert step.peak_bytes() < keeping.peak_bytes()
    saved_bytes = step.kept_sizes.element_bytes[Kind.SAVED] * (
        sum(keeping.kept_sizes.saved) - sum(step.kept_sizes.saved)
    )
    assert saved_bytes > 0
    assert keeping.estimate().step < whole.step
