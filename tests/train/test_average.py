"""Averages of weights: one device's under every sharding, judged beside the weights, and left in a file."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardlab.execute import OptimizerConfig
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.algorithms import averaged
from shardlab.execute.settings import Settings
from shardlab.language import Holds, Mesh
from shardlab.models import GPT, MoE
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.config import LoggingConfig
from shardlab.train.data.corpus import Corpus
from shardlab.train.huggingface import converted, open_source
from shardlab.train.job import Job
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.train.plainly import train_plainly
from tests.train.runs import run_of
from tests.train.verify_cases import ROOTED

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, ffn_hidden_size=2048)
PLANS = {name: SHARDINGS[name] for name in ("ddp", "zero-1", "fsdp", "partial", "tp", "tp+sp+zero-1", "cp", "ep")}
PIPED = {"1f1b": Plan(Mesh(pp=2)), "1f1b of zero-1": replace(SHARDINGS["zero-1"], mesh=Mesh(dp_shard=2, pp=2))}


def job_of(plan: Plan, precision: str = "fp64") -> Job:
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8) if plan.mesh.ep > 1 else MODEL
    return Job(plan, plan.mesh.world, 2 * plan.data_ranks, model, 2, precision, ema=0.7)


@pytest.mark.parametrize(
    ("name", "precision"),
    [*((name, "fp64") for name in (*PLANS, *PIPED)), *((name, "bf16") for name in ("ddp", "fsdp", "tp", "1f1b"))],
)
def test_averages_are_one_device_s_under_every_sharding(ranks: World, name: str, precision: str) -> None:
    """In lower precision where they are cut by nobody, by data axes, by `tp` and by stages."""
    job = job_of((PLANS | PIPED)[name], precision)
    verdict = ranks(job.ranks).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("program", ["offloaded", "state_away", "weights_away", "state_goes_to_weight"])
def test_averages_of_weights_and_states_that_lie_elsewhere_are_one_device_s(ranks: World, program: str) -> None:
    job = Job(f"tests/check/offloading_programs.py:{program}", 2, 4, MODEL, 2, "fp64", ema=0.7)
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("program", ["examples/parameter_server.py:parameter_server", f"{ROOTED}:by_root"])
def test_ranks_that_step_nothing_are_given_averages_of_what_they_keep(ranks: World, program: str) -> None:
    job = Job(program, 2, 4, MODEL, 2, "fp64", ema=0.7)
    verdict = ranks(2).call(verify_rank, CPU, job, 3)[0]
    assert verdict.ok, verdict


def looked_at(rank: int, job: Job, spoiled: int) -> list[bool]:
    """For three steps, of which the gradient of one is not finite: whether the averages are what they should be."""
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    optimizer = OptimizerConfig(schedule_steps=3, warmup_steps=1, ema=0.7)
    settings = Settings(0, job.numbers, CPU, optimizer)
    executor = Executor(job.checked(), rank, job.cut, batches, settings)
    state, followed, right = executor.state, list[dict[tuple[int, Holds], torch.Tensor]](), list[bool]()
    for step in range(3):
        before = {key: kept.clone() for key, kept in state.kept.items()}
        state.loss_scale.scale = float("nan") if step == spoiled else 1.0
        executor.step()
        after = {key: kept.clone() for key, kept in state.kept.items()}
        if step != spoiled:
            followed.append(after)
        else:
            right.append(all(torch.equal(before[key], after[key]) for key in before))
        ages = [0.7**age for age in reversed(range(len(followed)))]
        with averaged(state):
            for key, kept in state.kept.items():
                mean = sum(age * weights[key] for age, weights in zip(ages, followed, strict=True))
                expected = mean / sum(ages) if followed else before[key]
                right.append(bool(torch.allclose(kept, torch.as_tensor(expected), rtol=1e-12, atol=1e-14)))
        right.append(all(torch.equal(kept, after[key]) for key, kept in state.kept.items()))
    return right


CLIPPED = Job("tests/check/offloading_programs.py:clipped_here", 2, 4, MODEL, 2, "fp64", ema=0.7)


@pytest.mark.parametrize("job", [job_of(SHARDINGS["zero-1"]), CLIPPED], ids=["zero-1", "weights elsewhere"])
@pytest.mark.parametrize("spoiled", [0, 1])
def test_a_step_that_is_left_out_is_not_averaged_and_a_look_leaves_the_weights(
    ranks: World, job: Job, spoiled: int
) -> None:
    for right in ranks(2).call(looked_at, job, spoiled):
        assert all(right)


def trained(world: World, run: TrainingRun) -> Summary:
    summary = world(run.job.ranks).call(train_plainly, run)[0]
    assert isinstance(summary, Summary)
    return summary


@pytest.mark.parametrize("strategy", ["fsdp", "zero-1"])
def test_a_run_tells_the_loss_of_averages_and_leaves_a_file_that_goes_where_its_folder_does(
    ranks: World, tmp_path: Path, strategy: str
) -> None:
    optimizer = OptimizerConfig(learning_rate=1e-2, schedule_steps=8, warmup_steps=2, ema=0.8)
    run = run_of(Job(strategy, 2, 4, MODEL, 2), optimizer, tmp_path / "run")
    run = replace(run, config=replace(run.config, logging=LoggingConfig(validate_every=4)))
    summary = trained(ranks, run)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (look,) = [record for record in records if "validation_loss" in record]
    assert look["validation_loss"] != look["validation_loss_ema"]
    assert summary.validation_after_ema is not None
    assert summary.validation_after < summary.validation_after_ema < summary.validation_before
    file = tmp_path / "run" / "ema.safetensors"
    plain, averages = load_file(file.parent / "weights.safetensors"), load_file(file)
    assert {name: tensor.shape for name, tensor in averages.items()} == {n: t.shape for n, t in plain.items()}

    still = OptimizerConfig(learning_rate=0.0, schedule_steps=1, warmup_steps=0, weight_decay=0.0)
    converted(open_source(file), tmp_path / "hf", "hf")
    for name, init in (("file", file), ("hf", tmp_path / "hf")):
        again = trained(ranks, run_of(Job("single", 1, 4, MODEL, 2), still, tmp_path / f"from {name}", init=init))
        assert again.validation_before == pytest.approx(summary.validation_after_ema, rel=1e-6)
        assert again.validation_after_ema is None
        assert not (tmp_path / f"from {name}" / "ema.safetensors").exists()
