"""Context parallelism on real processes gives one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardlab.models import GPT, MLP, Blocks
from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job
from shardlab.train.verify import Verdict, verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

CP, BOTH = ("cp",), ("dp_shard", "cp")
RING, GATHERED = Plan(Mesh(cp=2)), Plan(Mesh(cp=2), context="all_gather")


def cut_along(plan: Plan, axes: tuple[str, ...]) -> Plan:
    """Everything sharded along some axes."""
    return replace(plan, shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes, reshard_after="stage")


def verdict_of(world: World, plan: Plan, microbatches: int, model: Blocks) -> Verdict:
    job = Job(plan, plan.mesh.world, microbatches, model, 2, torch.float64)
    return world(plan.mesh.world).call(verify_rank, CPU, job, 2)[0]


@pytest.mark.parametrize(
    ("plan", "microbatches"),
    [
        (RING, 1),
        (Plan(Mesh(cp=4)), 2),
        (replace(GATHERED, recompute="full"), 3),
        (replace(GATHERED, mesh=Mesh(cp=4), shard_optimizer=CP), 1),
        (cut_along(Plan(Mesh(cp=2, dp_shard=2)), BOTH), 4),
        (replace(GATHERED, mesh=Mesh(cp=2, dp_replicate=2)), 2),
        (Plan(Mesh(pp=2, cp=2), "zb-h1"), 2),
        (cut_along(Plan(Mesh(pp=2, cp=2), "interleaved-1f1b", context="all_gather"), CP), 3),
    ],
)
def test_plans_give_the_numbers_of_one_device(ranks: World, plan: Plan, microbatches: int) -> None:
    model = GPT(layers=2, width=16, heads=4, kv_heads=2, block=16, vocabulary=40)
    verdict = verdict_of(ranks, plan, microbatches, model)
    assert verdict.ok, verdict


@pytest.mark.parametrize("plan", [RING, GATHERED])
def test_attention_draws_the_masks_of_one_device(ranks: World, plan: Plan) -> None:
    model = GPT(layers=2, width=16, heads=4, block=12, vocabulary=40, dropout=0.2)
    verdict = verdict_of(ranks, plan, 2, model)
    assert verdict.ok, verdict


def test_a_model_without_attention_is_cut_as_well(ranks: World) -> None:
    verdict = verdict_of(ranks, RING, 2, MLP(layers=2, width=16, block=8))
    assert verdict.ok, verdict


def refused(rank: int, job: Job) -> str:
    try:
        verify_rank(rank, CPU, job, 1)
    except UserError as error:
        return str(error)
    return ""


def test_sequences_that_do_not_divide_are_refused(ranks: World) -> None:
    job = Job(RING, 2, 1, GPT(layers=1, block=10), 2)
    said = ranks(2).call(refused, job)
    assert all("sequences of 10 tokens do not divide into 4 slices (remainder 2)" in each for each in said), said
