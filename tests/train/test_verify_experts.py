"""Expert parallelism on real processes gives one device's numbers, alone and with the other data axes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardlab.execute import AdamW
from shardlab.models import GPT, MoE
from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job
from shardlab.train.loop import Run, Summary, train_rank
from shardlab.train.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SHARD = ("dp_shard",)
CUT = {"shard_parameters": SHARD, "shard_gradients": SHARD, "shard_optimizer": SHARD}
PLANS = {
    "one device": Plan(),
    "ep 2": Plan(Mesh(ep=2)),
    "ep 2, each microbatch": Plan(Mesh(ep=2), reduce_each=("ep",)),
    "ep 2, experts recomputed": Plan(Mesh(ep=2), recompute="full"),
    "ep 4": Plan(Mesh(ep=4)),
    "fsdp x ep": Plan(Mesh(dp_shard=2, ep=2), **CUT),
    "zero-1 x ep": Plan(Mesh(dp_shard=2, ep=2), shard_optimizer=SHARD),
    "ddp x ep": Plan(Mesh(dp_replicate=2, ep=2)),
    "1f1b x ep": Plan(Mesh(pp=2, ep=2)),
    "zb-h1 x ep": Plan(Mesh(pp=2, ep=2), "zb-h1"),
}
SMALL = {"layers": 3, "width": 16, "heads": 2, "block": 8, "auxiliary": 0.1}
DROPLESS = MoE(capacity_factor=None, **SMALL)
DROPPING = MoE(capacity_factor=0.7, dropout=0.2, **SMALL)
SWITCH = MoE(top_k=1, capacity_factor=1.0, **SMALL)


MODELS = {"dropless": DROPLESS, "dropping": DROPPING, "switch": SWITCH}
SAMPLE = [
    *zip(PLANS, list(MODELS) * len(PLANS), strict=False),
    ("ep 2, experts recomputed", "dropping"),
    ("fsdp x ep", "dropping"),
]
"""Every plan with one of the models, and two with another one as well."""


@pytest.mark.parametrize(("name", "model"), SAMPLE)
def test_expert_parallelism_gives_the_numbers_of_one_device(ranks: World, name: str, model: str) -> None:
    plan = PLANS[name]
    there = Job(plan, plan.mesh.world, 2 * plan.data_ranks, MODELS[model], 2, torch.float64)
    verdict = ranks(plan.mesh.world).call(verify_rank, CPU, there, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("strategy", ["grad-accum", "ddp", "fsdp", "gpipe"])
def test_whole_mixtures_train_under_every_strategy(ranks: World, strategy: str) -> None:
    count = 1 if strategy == "grad-accum" else 2
    there = Job(strategy, count, 4, MoE(**SMALL | {"layers": 4}, dropout=0.1), 2, torch.float64)
    verdict = ranks(count).call(verify_rank, CPU, there, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("model", [DROPLESS, DROPPING], ids=["dropless", "dropping"])
def test_microbatches_that_go_through_experts_together_give_the_same_numbers(ranks: World, model: MoE) -> None:
    there = Job("expert-parallel", 4, 8, model, 2, torch.float64)
    verdict = ranks(4).call(verify_rank, CPU, there, 2)[0]
    assert verdict.ok, verdict


def test_a_training_run_leaves_all_experts_and_lowers_the_loss(ranks: World, tmp_path: Path) -> None:
    model = MoE(**SMALL | {"layers": 2})
    there = Job("expert-parallel", 2, 4, model, 2)
    plan = Run(there, AdamW(learning_rate=1e-2, steps=20, warmup=2), None, tmp_path / "run")
    summary = ranks(2).call(train_quietly, plan)[0]
    assert summary.validation_after < summary.validation_before - 0.3
    weights = load_file(tmp_path / "run" / "weights.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == model.parameter_count


def train_quietly(rank: int, plan: Run) -> Summary | None:
    return train_rank(rank, CPU, plan)


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(UserError, match="ep 2, which cuts mixtures of experts, but GPT has none; train a MoE"):
        Job(PLANS["ep 2"], 2, 2, GPT(layers=2), 1).checked()
