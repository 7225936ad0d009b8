"""A checkpoint that one plan wrote is read under any other, and no rank reads more than it keeps."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardlab.execute import kernel_choice
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.state import State
from shardlab.language import Mesh
from shardlab.models import GPT, Blocks, Mixtral
from shardlab.models.tensors.compute import KERNEL_CHOICES, Product
from shardlab.strategies import Plan
from shardlab.train.checkpoint.contents import kept_ranges, updates_of
from shardlab.train.checkpoint.read import Checkpoint
from shardlab.train.job import Job
from shardlab.train.run import TrainingRun
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.checkpoint.filled import fill, known, saved, states_of
from tests.train.checkpoint.runs import STEPS, saving_run, trained

SIZES: dict[str, Any] = {"hidden_size": 24, "heads": 4, "vocab_size": 41, "seq_len": 8}
MODEL = GPT(layers=2, **SIZES)
SHARD = ("dp_shard",)
SHARDED: dict[str, Any] = {"shard_parameters": SHARD, "shard_gradients": SHARD, "shard_optimizer": SHARD}

PLANS: dict[str, tuple[str | Plan, int]] = {
    "single": ("single", 1),
    "ddp": ("ddp", 2),
    "zero-1": ("zero-1", 2),
    "fsdp": ("fsdp", 4),
    "fsdp of 3": ("fsdp", 3),
    "hsdp": ("hsdp", 4),
    "1f1b": ("1f1b", 2),
    "pipeline-fsdp": ("pipeline-fsdp", 4),
    "tp": (Plan(Mesh(tp=2)), 2),
    "tp of 4, sequence-parallel": (Plan(Mesh(tp=4), sequence_parallel=True), 4),
    "tp, sharded": (Plan(Mesh(dp_shard=2, tp=2), **SHARDED), 4),
    "zero-3 in tiles": (Plan(Mesh(dp_shard=2), **SHARDED, passes="tile=4"), 2),
    "tp in tiles": (Plan(Mesh(dp_shard=2, tp=2), **SHARDED, passes="tile=2"), 4),
    "cp and tp": (Plan(Mesh(cp=2, tp=2), context="ulysses"), 4),
    "3d": ("3d", 8),
}
MIXTURE = Mixtral(layers=2, **SIZES, experts=4, capacity_factor=None)
OTHERS: dict[str, tuple[Blocks, dict[str, tuple[str | Plan, int]], str, dict[str, Any]]] = {
    "a mixture": (
        MIXTURE,
        {"ddp": ("ddp", 2), "ep": (Plan(Mesh(ep=2)), 2), "tp and ep": (Plan(Mesh(tp=2, ep=2)), 4)},
        "fp32",
        {},
    ),
    "a tied head": (
        GPT(layers=2, **SIZES, tied=True),
        {"zero-3": ("zero-3", 2), "pp": (Plan(Mesh(pp=2)), 2), "tp": (Plan(Mesh(tp=2)), 2)},
        "fp32",
        {},
    ),
    "bf16 and exact copies": (
        MODEL,
        {"zero-3": ("zero-3", 3), "1f1b": ("1f1b", 2), "tp": (Plan(Mesh(tp=2)), 2)},
        "bf16",
        {},
    ),
    "muon": (MODEL, {"ddp": ("ddp", 2), "1f1b": ("1f1b", 2)}, "fp32", {"optimizer": "muon"}),
    "sgd": (MODEL, {"fsdp": ("fsdp", 2), "tp": (Plan(Mesh(tp=2)), 2)}, "fp32", {"optimizer": "sgd"}),
}


def want_each_read(states: dict[str, list[State]], writer: str, readers: list[str], folder: Path) -> None:
    """Whatever has read the writer's checkpoint has every element in its place, and no rank has read more."""
    checkpoint = saved(fill(states[writer]), folder)
    for reader in readers:
        for state in states[reader]:
            for piece in kept_ranges(state):
                piece.tensor.detach().fill_(torch.nan)
            read = checkpoint.restore(state)
            assert read <= 1.1 * sum(piece.tensor.nbytes for piece in kept_ranges(state))
            for piece in kept_ranges(state):
                assert torch.equal(piece.tensor, known(state, piece)), (piece.kind, piece.layer, piece.start)
            assert (state.step, updates_of(state)) in ((3, 3), (3, 0))


@cache
def states() -> dict[str, list[State]]:
    """Every plan's states, made once."""
    jobs = {name: Job(strategy, ranks, 12 // ranks * ranks, MODEL, 1) for name, (strategy, ranks) in PLANS.items()}
    return {name: states_of(job) for name, job in jobs.items()}


@pytest.mark.parametrize("writer", sampled(PLANS, list(PLANS)[::5].__contains__))
def test_checkpoints_of_each_plan_are_read_by_it_and_by_others(writer: str, tmp_path: Path) -> None:
    """Each writes for five and reads from five, so that its slices meet coarser and finer ones on both sides.

    Every fifth one writes for all others in turn.
    """
    names = list(PLANS)
    readers = [names[(names.index(writer) + apart) % len(names)] for apart in (0, 1, 2, 4, 8)]
    want_each_read(states(), writer, readers, tmp_path)


@pytest.mark.parametrize("case", OTHERS)
def test_other_models_numbers_and_optimizers_are_read_under_every_plan_too(case: str, tmp_path: Path) -> None:
    model, plans, precision, optimizer = OTHERS[case]
    jobs = {name: Job(strategy, ranks, 12, model, 2, precision) for name, (strategy, ranks) in plans.items()}
    states = {name: states_of(job, OptimizerConfig(**optimizer)) for name, job in jobs.items()}
    for writer, reader in zip(states, [*list(states)[1:], *states], strict=False):
        want_each_read(states, writer, [writer, reader], tmp_path / writer)


def test_a_rank_of_four_reads_a_quarter(tmp_path: Path) -> None:
    checkpoint = saved(fill(states()["tp"]), tmp_path)
    tensors = sum(entry["size"] for name, entry in checkpoint.files.items() if name.endswith(".safetensors"))
    assert all(checkpoint.restore(state) < 0.3 * tensors for state in states()["fsdp"])


# A run that goes on under another plan, or in other numbers, goes on as it would have, to rounding.


pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
SMALL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)
OTHER_PLANS_PLANS: dict[str, tuple[str | Plan, int]] = {
    "ddp": ("ddp", 2),
    "fsdp": ("fsdp", 4),
    "1f1b": ("1f1b", 2),
    "tp": (Plan(Mesh(tp=2)), 2),
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


@pytest.mark.parametrize(
    ("one", "other"),
    sampled(
        [("fsdp", "1f1b"), ("1f1b", "ddp"), ("1f1b", "tp"), ("1f1b", "tp and zero-3"), ("tp and zero-3", "ddp")],
        [("1f1b", "ddp")].__contains__,
    ),
)
def test_another_plan_goes_on_to_rounding(one: str, other: str, ranks: World, tmp_path: Path) -> None:
    """The one that the suite runs goes on with another number of data-parallel ranks."""
    jobs = [Job(*OTHER_PLANS_PLANS[name], 4, SMALL, 2, "fp64") for name in (one, other)]
    losses, expected = gone_on(ranks, tmp_path, *jobs)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert losses[:4] == expected[:4]


@pytest.mark.parametrize(("one", "other"), [("fp32", "bf16"), ("bf16", "fp32")])
def test_other_numbers_go_on_to_their_rounding(one: str, other: str, ranks: World, tmp_path: Path) -> None:
    jobs = [Job("zero-3", 2, 4, SMALL, 2, precision) for precision in (one, other)]
    losses, expected = gone_on(ranks, tmp_path, *jobs)
    assert losses == pytest.approx(expected, rel=2e-2 if "bf16" in (one, other) else 1e-5)


# A run that is resumed ends as one that was never interrupted, to the last bit.


TP = Plan(Mesh(tp=2))

AWAY = Path(__file__).parents[2] / "check" / "offloading_programs.py"

SAME: dict[str, tuple[str | Plan, int, dict[str, Any], dict[str, Any]]] = {
    # name: strategy, ranks, fields of the job, fields of the optimizer
    "single": ("single", 1, {}, {}),
    "ddp": ("ddp", 2, {}, {}),
    "zero-1": ("zero-1", 2, {}, {}),
    "fsdp": ("fsdp", 2, {}, {}),
    "hsdp": ("hsdp", 4, {}, {}),
    "1f1b": ("1f1b", 2, {}, {}),
    "tp": (TP, 2, {}, {}),
    "3d": ("3d", 8, {}, {}),
    "weights and states in the host's memory": (f"{AWAY}:offloaded", 2, {}, {}),
    "states on the disk": (f"{AWAY}:state_away", 2, {}, {}),
    "weights on the disk": (f"{AWAY}:weights_away", 2, {}, {}),
    "gathered weights": ("fsdp", 2, {"passes": "fuse-steps=2"}, {}),
    "tiles": ("zero-3", 2, {"passes": "tile=2"}, {}),
    "sgd": ("fsdp", 2, {}, {"optimizer": "sgd"}),
    "lion": ("tp", 2, {}, {"optimizer": "lion"}),
    "muon": ("ddp", 2, {}, {"optimizer": "muon"}),
    "bf16": ("zero-3", 2, {"precision": "bf16"}, {}),
    "fp16": ("zero-3", 2, {"precision": "fp16"}, {"clip": 1.0}),
    "an average": ("zero-1", 2, {}, {"ema": 0.9}),
    "an average, and dropout": ("zero-1", 2, {"model": replace(SMALL, dropout=0.2)}, {"ema": 0.9}),
    "dropout": ("fsdp", 2, {"model": replace(SMALL, dropout=0.2)}, {}),
}


def want_same(
    world: Ranks,
    job: Job,
    settings: OptimizerConfig,
    folder: Path,
    ramp: str | None = None,
    train: Callable[..., None] = trained,
) -> Checkpoint:
    """A run that goes on after 4 of its 5 steps ends as the one that was not interrupted; returns its end."""
    whole, again = folder / "whole", folder / "again"
    world.call(train, saving_run(job, whole, optimizer=settings, ramp=ramp))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step-000005")
    (again / "weights.safetensors").unlink()
    world.call(train, saving_run(job, again, again / "checkpoints" / "step-000004", settings, ramp))
    assert losses(again) == losses(whole)
    mine, its = (Checkpoint.open(run / "checkpoints" / "step-000005").verify() for run in (again, whole))
    assert mine.threads == torch.get_num_threads()
    assert mine.files == its.files
    assert mine.state == its.state
    weights, expected = (load_file(run / "weights.safetensors") for run in (again, whole))
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    return mine


SAMPLE = {"single", "tp", "1f1b", "states on the disk", "weights on the disk", "gathered weights", "tiles"} | {
    "muon", "fp16", "an average, and dropout"
}  # fmt: skip
"""One run for each thing that a checkpoint keeps."""


@pytest.mark.parametrize("name", sampled(SAME, SAMPLE.__contains__))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name: str, ranks: World, tmp_path: Path) -> None:
    strategy, world, job, optimizer = SAME[name]
    full_job = replace(Job(TP if strategy == "tp" else strategy, world, 4, SMALL, 2), **job)
    want_same(ranks(world), full_job, OptimizerConfig(schedule_steps=STEPS, warmup_steps=1, **optimizer), tmp_path)


def test_a_batch_that_grows_goes_on_growing(ranks: World, tmp_path: Path) -> None:
    settings = OptimizerConfig(schedule_steps=STEPS, warmup_steps=1)
    want_same(ranks(2), Job("zero-1", 2, 4, SMALL, 2), settings, tmp_path, "0:2,4:4")


def trained_with_kernels_of_its_own(rank: int, run: TrainingRun) -> None:
    """Train as `trained` does, on a machine where oneDNN makes gradients faster. A resumed run measures nothing."""

    def measured(product: Product) -> bool:
        assert rank == 0
        assert run.resume is None
        return product.backward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "is_onednn_faster", measured)
        patch.setenv("XDG_CACHE_HOME", str(run.out.parent / f"cache of {run.out.name}"))
        trained(rank, run)


def test_a_run_goes_on_with_the_kernels_that_it_has_chosen(ranks: World, tmp_path: Path) -> None:
    job = Job("1f1b", 2, 4, replace(SMALL, hidden_size=128), 2)
    settings = OptimizerConfig(schedule_steps=STEPS, warmup_steps=1)
    end = want_same(ranks(2), job, settings, tmp_path, train=trained_with_kernels_of_its_own)
    shapes = {(3 * 128, 128), (128, 128), (4 * 128, 128), (128, 4 * 128), (256, 128)}
    assert end.products == {
        Product(2 * SMALL.seq_len, inputs, outputs, has_bias and not backward, backward): backward
        for outputs, inputs in shapes
        for has_bias in [outputs != 256]
        for backward in (False, True)
    }
    assert not any(KERNEL_CHOICES.get(product) for product in end.products), "what a run has chosen ends with it"
    assert [folder.name for folder in tmp_path.glob("cache*")] == ["cache of whole"]
