"""A checkpoint that one plan wrote is read under any other, and no rank reads more than it keeps."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.state import State
from shardlab.language import Mesh
from shardlab.models import GPT, Blocks, Mixtral
from shardlab.strategies import Plan
from shardlab.train.checkpoint import updates_of
from shardlab.train.checkpoint.contents import held
from shardlab.train.job import Job
from tests.support.thorough import sampled
from tests.train.checkpoint.filled import fill, known, saved, states_of

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
            for each in held(state):
                each.tensor.detach().fill_(torch.nan)
            read = checkpoint.restore(state)
            assert read <= 1.1 * sum(each.tensor.nbytes for each in held(state))
            for each in held(state):
                assert torch.equal(each.tensor, known(state, each)), (each.kind, each.layer, each.start)
            assert (state.step, updates_of(state)) in ((3, 3), (3, 0))


@cache
def states() -> dict[str, list[State]]:
    """Every plan's states, made once."""
    jobs = {name: Job(strategy, ranks, 12 // ranks * ranks, MODEL, 1) for name, (strategy, ranks) in PLANS.items()}
    return {name: states_of(job) for name, job in jobs.items()}


@pytest.mark.parametrize("writer", sampled(PLANS, list(PLANS)[::2].__contains__))
def test_what_each_plan_wrote_is_read_by_itself_and_by_others(writer: str, tmp_path: Path) -> None:
    """Each writes for five and reads from five, so that its slices meet coarser and finer ones on both sides."""
    names = list(PLANS)
    readers = [names[(names.index(writer) + apart) % len(names)] for apart in (0, 1, 2, 4, 8)]
    want_each_read(states(), writer, readers, tmp_path)


@pytest.mark.parametrize("what", OTHERS)
def test_other_models_numbers_and_optimizers_are_read_under_every_plan_too(what: str, tmp_path: Path) -> None:
    model, plans, precision, optimizer = OTHERS[what]
    jobs = {name: Job(strategy, ranks, 12, model, 2, precision) for name, (strategy, ranks) in plans.items()}
    made = {name: states_of(job, OptimizerConfig(**optimizer)) for name, job in jobs.items()}
    for writer in made:
        want_each_read(made, writer, list(made), tmp_path / writer)


def test_a_rank_of_four_reads_a_quarter(tmp_path: Path) -> None:
    checkpoint = saved(fill(states()["tp"]), tmp_path)
    tensors = sum(entry["size"] for name, entry in checkpoint.files.items() if name.endswith(".safetensors"))
    assert all(checkpoint.restore(state) < 0.3 * tensors for state in states()["fsdp"])
