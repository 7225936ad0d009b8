"""A run that is resumed ends as one that was never interrupted, to the last bit."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from shardlab.execute import kernel_choice
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.models.tensors.compute import CHOICES, Product
from shardlab.strategies import Plan
from shardlab.train.checkpoint import Checkpoint
from shardlab.train.job import Job
from shardlab.train.run import TrainingRun
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.checkpoint.runs import STEPS, saving_run, trained

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
MODEL = GPT(layers=4, hidden_size=16, heads=2, seq_len=8)
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
    "dropout": ("fsdp", 2, {"model": replace(MODEL, dropout=0.2)}, {}),
}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def want_same(
    world: Ranks,
    made: Job,
    settings: OptimizerConfig,
    folder: Path,
    ramp: str | None = None,
    train: Callable[..., None] = trained,
) -> Checkpoint:
    """A run that goes on after 4 of its 5 steps ends as the one that was not interrupted; returns its end."""
    whole, again = folder / "whole", folder / "again"
    world.call(train, saving_run(made, whole, optimizer=settings, ramp=ramp))
    shutil.copytree(whole, again)
    shutil.rmtree(again / "checkpoints" / "step-000005")
    (again / "weights.safetensors").unlink()
    world.call(train, saving_run(made, again, again / "checkpoints" / "step-000004", settings, ramp))
    assert losses(again) == losses(whole)
    mine, its = (Checkpoint.open(run / "checkpoints" / "step-000005").verify() for run in (again, whole))
    assert mine.threads == torch.get_num_threads()
    assert mine.files == its.files
    assert mine.state == its.state
    found, wanted = (load_file(run / "weights.safetensors") for run in (again, whole))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    return mine


SAMPLE = {"single", "fsdp", "tp", "1f1b", "states on the disk", "weights on the disk", "gathered weights", "tiles"} | {
    "muon", "fp16", "an average", "dropout"
}  # fmt: skip
"""One run for each thing that a checkpoint keeps."""


@pytest.mark.parametrize("name", sampled(SAME, SAMPLE.__contains__))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(name: str, ranks: World, tmp_path: Path) -> None:
    strategy, world, job, optimizer = SAME[name]
    made = replace(Job(TP if strategy == "tp" else strategy, world, 4, MODEL, 2), **job)
    want_same(ranks(world), made, OptimizerConfig(schedule_steps=STEPS, warmup_steps=1, **optimizer), tmp_path)


def test_a_batch_that_grows_goes_on_growing(ranks: World, tmp_path: Path) -> None:
    settings = OptimizerConfig(schedule_steps=STEPS, warmup_steps=1)
    want_same(ranks(2), Job("zero-1", 2, 4, MODEL, 2), settings, tmp_path, "0:2,4:4")


def trained_with_kernels_of_its_own(rank: int, run: TrainingRun) -> None:
    """As `trained`, on a machine where oneDNN makes gradients faster; none is measured when the run goes on."""

    def measured(product: Product) -> bool:
        assert rank == 0
        assert run.resume is None
        return product.backward

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel_choice, "measured", measured)
        patch.setenv("XDG_CACHE_HOME", str(run.out.parent / f"cache of {run.out.name}"))
        trained(rank, run)


def test_a_run_goes_on_with_the_kernels_that_it_has_chosen(ranks: World, tmp_path: Path) -> None:
    made = Job("1f1b", 2, 4, replace(MODEL, hidden_size=128), 2)
    settings = OptimizerConfig(schedule_steps=STEPS, warmup_steps=1)
    end = want_same(ranks(2), made, settings, tmp_path, train=trained_with_kernels_of_its_own)
    shapes = {(3 * 128, 128), (128, 128), (4 * 128, 128), (128, 4 * 128), (256, 128)}
    assert end.products == {
        Product(2 * MODEL.seq_len, inputs, outputs, has_bias and not backward, backward): backward
        for outputs, inputs in shapes
        for has_bias in [outputs != 256]
        for backward in (False, True)
    }
    assert not any(CHOICES.get(product) for product in end.products), "what a run has chosen ends with it"
    assert [folder.name for folder in tmp_path.glob("cache*")] == ["cache of whole"]
