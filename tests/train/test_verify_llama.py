"""Llama and Mixtral on real processes give one device's numbers, however they are cut."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.models import GPT, Blocks, Llama, Mixtral
from shardlab.program import Mesh
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job
from shardlab.train.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]

SHARD = ("dp_shard",)
SMALL = {"layers": 2, "width": 16, "heads": 4, "kv_heads": 2, "block": 16, "vocabulary": 40}
LLAMA = Llama(**SMALL)
DROPPING = Llama(dropout=0.2, tied=True, **SMALL)
NEMOTRON = GPT(activation="squared_relu", rope_theta=1e4, bias=False, ffn_hidden=48, **SMALL)


@pytest.mark.parametrize(
    ("plan", "model"),
    [
        (Plan(Mesh(tp=2)), LLAMA),
        (Plan(Mesh(tp=2), sequence_parallel=True), DROPPING),
        (Plan(Mesh(tp=2, dp_shard=2), shard_optimizer=SHARD, sequence_parallel=True), NEMOTRON),
        (Plan(Mesh(cp=2)), LLAMA),
        (Plan(Mesh(cp=2), context="all_gather", recompute="full"), DROPPING),
        (Plan(Mesh(cp=2, pp=2), "zb-h1"), NEMOTRON),
        (Plan(Mesh(pp=2), "zb-h1"), LLAMA),
        (Plan(Mesh(dp_shard=2), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD), LLAMA),
        (Plan(Mesh(cp=2, tp=2)), LLAMA),
        (Plan(Mesh(cp=2, tp=2), sequence_parallel=True, recompute="full"), DROPPING),
        (Plan(Mesh(tp=2), recompute="selective"), NEMOTRON),
        (Plan(Mesh(ep=2)), Mixtral(**SMALL)),
        (Plan(Mesh(pp=2, ep=2)), Mixtral(capacity_factor=None, **SMALL)),
    ],
)
def test_plans_give_the_numbers_of_one_device(ranks: World, plan: Plan, model: Blocks) -> None:
    job = Job(plan, plan.mesh.world, 2 * plan.data_ranks, model, 2, torch.float64)
    verdict = ranks(plan.mesh.world).call(verify_rank, torch.device("cpu"), job, 2)[0]
    assert verdict.ok, verdict
