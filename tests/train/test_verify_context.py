"""Context parallelism on real processes gives one device's numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.models import GPT, MLP, Blocks
from shardlab.program import UserError
from shardlab.train.job import Job
from shardlab.train.verify import Verdict, verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

STRATEGY = """
from shardlab.program import Mesh
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned

PLAN = {plan}


def follow_mesh(ranks):
    return PLAN.mesh


async def follow(rank):
    await planned(PLAN)(rank)
"""
CUT = 'shard_parameters={0}, shard_gradients={0}, shard_optimizer={0}, reshard_after="stage"'


def verdict_of(world: World, folder: Path, plan: str, ranks: int, microbatches: int, model: Blocks) -> Verdict:
    file = folder / "plan.py"
    file.write_text(STRATEGY.format(plan=plan))
    job = Job(f"{file}:follow", ranks, microbatches, model, 2, torch.float64)
    return world(ranks).call(verify_rank, CPU, job, 2)[0]


@pytest.mark.parametrize(
    ("plan", "count", "microbatches"),
    [
        ("Plan(Mesh(cp=2))", 2, 1),
        ('Plan(Mesh(cp=2), context="all_gather", recompute="full")', 2, 3),
        ("Plan(Mesh(cp=4))", 4, 2),
        ('Plan(Mesh(cp=4), context="all_gather", shard_optimizer=("cp",))', 4, 1),
        (f"Plan(Mesh(cp=2, dp_shard=2), {CUT.format(('dp_shard', 'cp'))})", 4, 4),
        ('Plan(Mesh(cp=2, dp_replicate=2), context="all_gather")', 4, 2),
        ('Plan(Mesh(pp=2, cp=2), "zb-h1")', 4, 2),
        (f'Plan(Mesh(pp=2, cp=2), "interleaved-1f1b", context="all_gather", {CUT.format(("cp",))})', 4, 3),
    ],
)
def test_plans_give_the_numbers_of_one_device(
    ranks: World, tmp_path: Path, plan: str, count: int, microbatches: int
) -> None:
    model = GPT(layers=2, width=16, heads=4, kv_heads=2, block=16, vocabulary=40)
    verdict = verdict_of(ranks, tmp_path, plan, count, microbatches, model)
    assert verdict.ok, verdict


@pytest.mark.parametrize("context", ["ring", "all_gather"])
def test_attention_draws_the_masks_of_one_device(ranks: World, tmp_path: Path, context: str) -> None:
    model = GPT(layers=2, width=16, heads=4, block=12, vocabulary=40, dropout=0.2)
    verdict = verdict_of(ranks, tmp_path, f'Plan(Mesh(cp=2), context="{context}")', 2, 2, model)
    assert verdict.ok, verdict


def test_a_model_without_attention_is_cut_as_well(ranks: World, tmp_path: Path) -> None:
    verdict = verdict_of(ranks, tmp_path, "Plan(Mesh(cp=2))", 2, 2, MLP(layers=2, width=16, block=8))
    assert verdict.ok, verdict


def refused(rank: int, job: Job) -> str:
    try:
        verify_rank(rank, CPU, job, 1)
    except UserError as error:
        return str(error)
    return ""


def test_sequences_that_do_not_divide_are_refused(ranks: World, tmp_path: Path) -> None:
    file = tmp_path / "plan.py"
    file.write_text(STRATEGY.format(plan="Plan(Mesh(cp=2))"))
    job = Job(f"{file}:follow", 2, 1, GPT(layers=1, block=10), 2)
    said = ranks(2).call(refused, job)
    assert all("sequences of 10 tokens do not divide into 4 slices (remainder 2)" in each for each in said), said
