"""Blocks that a plan freezes keep their weights, and have neither gradients nor optimizer states."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from shardlab.check import check
from shardlab.cli import main
from shardlab.common.errors import UserError
from shardlab.language import Mesh, OpKind, trace
from shardlab.language.precision import Optimizer
from shardlab.models import GPT, Blocks, MoE
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import planned
from shardlab.train.job import Job
from shardlab.train.verification.cases import SHARDINGS
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import examples, sampled

World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8, bias=False)
PIPELINE = Plan(Mesh(pp=2))


def job_of(plan: Plan, model: Blocks = MODEL, optimizer: Optimizer = "adamw") -> Job:
    if plan.mesh.ep > 1:
        model = MoE(layers=4, hidden_size=16, heads=2, seq_len=8, bias=False)
    return Job(plan, plan.mesh.world, 2 * plan.data_ranks, model, 2, "fp64", optimizer=optimizer)


CASES: dict[str, Job] = {
    **{name: job_of(replace(plan, freeze=(0, 2))) for name, plan in SHARDINGS.items()},
    "a whole stage": job_of(replace(PIPELINE, freeze=(0, 1))),
    "split backward passes": job_of(replace(PIPELINE, schedule="zb-v", freeze=(1, 3))),
    "a tied embedding": job_of(replace(PIPELINE, freeze=(0,)), replace(MODEL, tied=True)),
    "a tied head": job_of(replace(PIPELINE, freeze=(3,)), replace(MODEL, tied=True)),
    "blocks that are recomputed": job_of(replace(PIPELINE, recompute="full", freeze=(2,))),
    "muon": job_of(replace(SHARDINGS["fsdp"], freeze=(1,)), optimizer="muon"),
}
SAMPLE = {"zero-1", "tp+fsdp", "ep", "a whole stage", "split backward passes", "a tied embedding"}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", sampled(CASES, SAMPLE.__contains__))
def test_the_numbers_are_those_of_one_device_that_freezes_the_same_blocks(ranks: World, name: str) -> None:
    job = CASES[name]
    verdict = ranks(job.ranks).call(verify_rank, CPU, job, 2, {}, 0.1)[0]
    assert verdict.ok, verdict


@settings(max_examples=examples(45), deadline=None)
@given(st.sampled_from(sorted(CASES)), st.sets(st.integers(0, 3), max_size=3))
def test_frozen_blocks_alone_have_no_gradient_and_no_state(name: str, blocks: set[int]) -> None:
    plan = CASES[name].strategy
    assert isinstance(plan, Plan)
    job = job_of(replace(plan, freeze=tuple(blocks), recompute="none"))
    checked = check(trace(planned(job.strategy), job.entry.grid(job.ranks), job.sizes, job.microbatches))  # pyright: ignore
    of_blocks = {
        layer for layer, run in enumerate(job.cut.runs) if any(block in blocks for block, _ in run.parameters())
    }
    assert set(checked.frozen) == {layer for layer in of_blocks if job.sizes.weights[layer]}
    of_weights = {OpKind.LOAD_OPT_STATE, OpKind.UPDATE, OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT, OpKind.NORM}
    touched = {op.layer for tape in checked.program.tapes for op in tape if op.kind in of_weights}
    assert not touched & of_blocks


@pytest.mark.parametrize(
    ("freeze", "sentence"),
    [
        ((4,), "freeze names block 4, but the model has blocks 0-3; give numbers of these"),
        ((0, 1, 2, 3), "freeze names all 4 blocks of the model, so nothing is trained; leave some out"),
        ((0, 2), "freeze names block 0 and not block 1, but this plan cuts blocks so that the last biases of a block"),
    ],
)
def test_blocks_that_cannot_be_frozen_are_one_sentence(freeze: tuple[int, ...], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        job_of(Plan(Mesh(tp=2), freeze=freeze), replace(MODEL, bias=True)).checked()


def test_a_run_from_other_weights_leaves_frozen_ones_bitwise_as_they_were_also_when_it_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    small = "--ranks 1 --layers 3 --hidden-size 16 --seq-len 8 --steps 1"
    assert main(["train", *small.split(), "--out", str(first)]) == 0
    words = "--dp-shard 1 --freeze 0 1 --seq-len 8 --ema 0.9 --clip 1"
    assert main(["train", "--init", str(first), *words.split(), "--steps", "1", "--out", str(second)]) == 0
    assert main(["train", "--resume", str(second), "--steps", "2"]) == 0
    before = load_file(first / "weights.safetensors")
    for name in ("weights", "ema"):
        after = load_file(second / f"{name}.safetensors")
        for part, weights in before.items():
            frozen = part.startswith(("layers.0.", "layers.1."))
            assert torch.equal(weights, after[part]) == frozen, part
    capsys.readouterr()
    assert main(["train", "--resume", str(second), "--steps", "3", "--strategy", "zero-1", "--ranks", "1"]) == 2
    assert "--freeze: 0 1 before, none now; a run goes on as it has begun" in capsys.readouterr().err
