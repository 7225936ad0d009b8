"""A batch that grows: numbers of one device under every strategy, and figures of each step's own batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardlab.data import Corpus
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.collect import collect
from shardlab.models import GPT, CutModel
from shardlab.models.tensors import to_blocks
from shardlab.program import Mesh, UserError
from shardlab.strategies.plan import Plan
from shardlab.train.cases import SHARDINGS
from shardlab.train.data import Batches
from shardlab.train.job import Job
from shardlab.train.ramp import BatchRamp
from shardlab.train.ramped import RampedExecutor, want_same_slices
from shardlab.train.reference import train_reference
from shardlab.train.run import TrainingRun
from tests.support.ranks import Ranks
from tests.train.plainly import train_plainly
from tests.train.runs import run_of

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, dropout=0.1)
WORDS, STEPS = "0:2,2:6,3:4", 5
RAMP = BatchRamp.of(WORDS)
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, schedule_steps=STEPS, warmup_steps=1)
PLANS = {
    "fsdp": SHARDINGS["fsdp"],
    "tp": SHARDINGS["tp"],
    "1f1b": Plan(Mesh(pp=2), "1f1b"),
    "zb-v in an arena": Plan(Mesh(pp=2), "zb-v", passes="arena"),
}


def run_with(job: Job, out: Path) -> TrainingRun:
    run = run_of(job, OPTIMIZER, out)
    return replace(run, config=replace(run.config, train=replace(run.config.train, batch_ramp=WORDS)))


def batches_of(job: Job) -> Batches:
    return Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0, RAMP)


def ramped(rank: int, job: Job) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Each step's loss, as this rank sums it, with the tokens; and on rank 0 the weights in the end."""
    model, settings, batches = job.cut, Settings(0, job.numbers, CPU, OPTIMIZER), batches_of(job)
    proofs = {count: replace(job, microbatches=count).checked() for count in RAMP.counts}
    want_same_slices(proofs, job.cut)
    first = Executor(proofs[job.microbatches], rank, job.cut, batches, settings)
    executors = {
        count: first if count == job.microbatches else Executor(proof, rank, job.cut, batches, settings, of=first.state)
        for count, proof in proofs.items()
    }
    (arena,) = {each.state.arena.whole for each in executors.values()}  # one for all
    assert bool(arena.nbytes) == ("arena" in str(job.entry.passes_on(job.ranks)))
    executor = RampedExecutor(executors, run_with(job, Path("nowhere")))
    losses = [[float(figure) for figure in executor.step()] for _ in range(STEPS)]
    assert executor.state.step == STEPS
    found = (collect(first.state, first.state.kept, layer, 0) for layer in range(model.layers))
    flats = [flat for flat in found if flat is not None]
    return losses, to_blocks(model, flats) if flats and isinstance(model, CutModel) else flats


@pytest.mark.parametrize("name", PLANS)
def test_a_batch_that_grows_is_one_device_s_under_every_plan(ranks: World, name: str) -> None:
    plan = PLANS[name]
    job = Job(plan, plan.mesh.world, 4, replace(MODEL, layers=max(2, plan.natural_layers())), 2, "fp64")
    counts = [RAMP.microbatches(step) for step in range(STEPS)]
    assert counts == [2, 2, 6, 4, 4]
    alone = train_reference(job.model, batches_of(job), counts, 0, job.numbers, OPTIMIZER)
    found = ranks(job.ranks).call(ramped, job)
    losses = [
        [sum(part) for part in zip(*step, strict=True)] for step in zip(*(each for each, _ in found), strict=True)
    ]
    assert [tokens for _, tokens in losses] == [count * 2 * 8 for count in counts]
    assert [total / tokens for total, tokens in losses] == pytest.approx(alone.losses, rel=1e-12)
    for ours, theirs in zip(found[0][1], alone.weights, strict=True):
        assert torch.allclose(ours[: len(theirs)], theirs, rtol=0, atol=1e-12 * float(theirs.abs().max()))


def test_figures_of_a_step_are_of_its_own_batch(ranks: World, tmp_path: Path) -> None:
    job = Job("fsdp", 2, 4, MODEL, 2)
    ranks(2).call(train_plainly, run_with(job, tmp_path / "run"))
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for record, count in zip(records, [2, 2, 6, 4, 4], strict=True):
        assert record["sps"] == pytest.approx(2 * count / record["dt"])
        assert record["tps"] == pytest.approx(8 * record["sps"])
        assert 0 < record["dtf"] + record["dtb"] < record["dt"]


@pytest.mark.parametrize("other", ["fsdp", "tests/check/offloading_programs.py:offloaded"])
def test_a_strategy_that_cuts_or_offloads_weights_by_the_number_of_microbatches_is_refused(other: str) -> None:
    whole, different = (Job(strategy, 2, 4, MODEL, 2).checked() for strategy in ("ddp", other))
    with pytest.raises(UserError, match="with 4 microbatches the strategy keeps other slices of weights than with 2"):
        want_same_slices({2: whole, 4: different}, MODEL)


def test_a_strategy_that_carries_other_weights_by_the_number_of_microbatches_is_refused() -> None:
    """As `fuse-steps` makes of a program whose first gathers differ."""
    one, two = (Job("fsdp", 2, 4, MODEL, 2, passes=f"fuse-steps={count}").checked() for count in (1, 2))
    with pytest.raises(UserError, match=r"with 4 microbatches other weights are carried .* than with 2, .*fuse-steps"):
        want_same_slices({2: one, 4: two}, MODEL)
