"""A run that goes on under another plan, or in other numbers, goes on as it would have, to rounding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.strategies import Plan
from shardlab.train.job import Job
from tests.support.ranks import Ranks
from tests.train.checkpoint.runs import saving_run, trained

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8)
PLANS: dict[str, tuple[str | Plan, int]] = {
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 4),
    "1f1b": ("1f1b", 2),
    "tp and zero-3": (Plan(Mesh(dp_shard=2, tp=2), shard_parameters=("dp_shard",), shard_optimizer=("dp_shard",)), 4),
}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def gone_on(ranks: World, tmp_path: Path, one: Job, other: Job) -> tuple[list[float], list[float]]:
    """Losses of a run, and of the same one that goes on as another job after 2 of its 5 steps."""
    whole, again = tmp_path / "whole", tmp_path / "again"
    run = saving_run(one, whole)
    ranks(one.ranks).call(trained, run)
    assert len(losses(whole)) == 5
    shutil.copytree(whole, again)
    ranks(other.ranks).call(trained, saving_run(other, again, again / "checkpoints" / "step-000004"))
    return losses(whole), losses(again)


@pytest.mark.parametrize(("one", "other"), [("fsdp", "1f1b"), ("1f1b", "tp and zero-3"), ("tp and zero-3", "ddp")])
def test_another_plan_goes_on_to_rounding(one: str, other: str, ranks: World, tmp_path: Path) -> None:
    jobs = [Job(*PLANS[name], 4, MODEL, 2, "fp64") for name in (one, other)]
    found, wanted = gone_on(ranks, tmp_path, *jobs)
    assert found == pytest.approx(wanted, rel=1e-12)
    assert found[:4] == wanted[:4]


@pytest.mark.parametrize(("one", "other"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_other_numbers_go_on_to_their_rounding(one: str, other: str, ranks: World, tmp_path: Path) -> None:
    jobs = [Job("zero-3", 2, 4, MODEL, 2, precision) for precision in (one, other)]
    found, wanted = gone_on(ranks, tmp_path, *jobs)
    assert found == pytest.approx(wanted, rel=2e-2 if "bf16" in (one, other) else 1e-5)
