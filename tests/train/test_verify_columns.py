"""Layers cut by columns, and heads and sequences cut together, give one device's numbers on real processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardlab.models import GPT, MLP, Blocks
from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job
from shardlab.train.verify import TOLERANCE, verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

FOUR = Mesh(cp=2, tp=2)
GROUPED = GPT(layers=2, width=16, heads=4, kv_heads=2, block=16, vocabulary=40)
DROPS = GPT(layers=2, width=16, heads=4, kv_heads=2, block=16, vocabulary=39, dropout=0.2)


def verify(world: World, strategy: str | Plan, count: int, model: Blocks, microbatches: int = 2) -> None:
    job = Job(strategy, count, microbatches, model, 2, torch.float64)
    verdict = world(count).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("count", [2, 4])
def test_a_lecture_s_mlp_gives_the_numbers_of_one_device(ranks: World, count: int) -> None:
    verify(ranks, "column-parallel", count, MLP(layers=2, width=16, block=8, vocabulary=39, dropout=0.1))


def test_before_adamw_divides_a_small_gradient_by_its_size_only_rounding_is_left(ranks: World) -> None:
    """After the first step weights are up to 3.5e-13 apart, for the reason that `TOLERANCE` gives."""
    job = Job("column-parallel", 2, 4, MLP(layers=4, width=32, block=16), 2, torch.float64)
    first, third = (ranks(2).call(verify_rank, CPU, job, steps)[0] for steps in (1, 3))
    assert first.gradient_error < 1e-14
    assert first.gradient_error < third.gradient_error < TOLERANCE


def test_column_parallel_layers_are_those_of_an_mlp() -> None:
    with pytest.raises(UserError, match="column-parallel layers are matrices one after the other, but GPT has more"):
        Job("column-parallel", 2, 1, GPT(), 2).checked()


@pytest.mark.parametrize(
    "plan",
    [
        Plan(FOUR),
        Plan(FOUR, context="all_gather", sequence_parallel=True),
        Plan(FOUR, sequence_parallel=True, recompute="full"),
        Plan(Mesh(tp=2), recompute="selective"),
        Plan(Mesh(pp=2, tp=2), "zb-h1", sequence_parallel=True, recompute="selective"),
        Plan(Mesh(pp=2, tp=2), "zb-v", sequence_parallel=True, recompute="full"),
        Plan(Mesh(pp=2, dp_shard=2), "interleaved-1f1b", stages_per_rank=2, recompute="full"),
        Plan(Mesh(tp=2, dp_shard=2), recompute=(1,)),
    ],
    ids=str,
)
@pytest.mark.parametrize("model", [GROUPED, DROPS], ids=["plain", "dropout"])
def test_plans_give_the_numbers_of_one_device(ranks: World, plan: Plan, model: GPT) -> None:
    layers = max(2, plan.natural_layers())
    verify(ranks, plan, plan.mesh.world, replace(model, layers=layers), 2 * plan.data_ranks)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Mesh(cp=2, tp=2, dp_shard=2), *("1f1b", None, ()), ("dp_shard", "cp"), (), ("dp_shard", "cp")),
        Plan(Mesh(pp=2, cp=2, tp=2), "zb-h1", sequence_parallel=True, recompute="full"),
    ],
    ids=["fsdp", "zb-h1"],
)
def test_three_axes_on_eight_ranks(ranks: World, plan: Plan) -> None:
    verify(ranks, plan, 8, GROUPED, 2 * plan.data_ranks)


def test_embedding_and_head_may_be_tied(ranks: World) -> None:
    verify(ranks, Plan(FOUR, recompute="full"), 4, replace(GROUPED, tied=True))
    verify(ranks, Plan(Mesh(pp=2), "zb-v", recompute="selective"), 2, replace(GROUPED, tied=True, layers=4))
