"""In float32 on real processes, replicas that are said to drift do, and the others stay equal bit by bit."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.models import GPT, MLP
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
PROGRAMS = Path(__file__).parents[1] / "check" / "drifting.py"
STEPS = 3


def kept(rank: int, job: Job) -> dict[tuple[int, ...], bytes]:
    """The bits of the weights that a rank keeps after some steps, by layer and slices."""
    corpus = Corpus.split(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, optimizer=OptimizerConfig(schedule_steps=STEPS, warmup_steps=1))
    executor = Executor(job.checked(), rank, job.cut, batches, settings)
    for _ in range(STEPS):
        executor.step()
    dist.barrier()
    return {(layer, *holds): weight.numpy().tobytes() for (layer, holds), weight in executor.state.kept.items()}


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        (f"{PROGRAMS}:drifting", 3),
        (f"{PROGRAMS}:one_turned", 3),
        (f"{PROGRAMS}:drifting", 2),
        (f"{PROGRAMS}:all_in_one_order", 3),
        (f"{PROGRAMS}:chained", 3),
        (f"{PROGRAMS}:doubled", 4),
        (f"{PROGRAMS}:in_slices", 4),
        (f"{PROGRAMS}:broadcast", 3),
        ("ddp", 3),
        ("hsdp", 4),
        ("zero-1", 2),
    ],
    ids=lambda value: value.rpartition(":")[2] if isinstance(value, str) else str(value),
)
def test_replicas_differ_bitwise_just_where_they_are_said_to_drift(ranks: World, strategy: str, count: int) -> None:
    compare(ranks, Job(strategy, count, count, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2, "fp32"))


def test_a_sum_that_is_part_of_a_backward_pass_is_another_than_one_after_it(ranks: World) -> None:
    model = MLP(layers=3, hidden_size=16, seq_len=16)
    compare(ranks, Job(f"{PROGRAMS}:fused_on_one_rank", 2, 4, model, 2, "fp32"))


def compare(ranks: World, job: Job) -> None:
    """Want replicas to end apart just where the check says so."""
    groups = [list(map(list, drift.groups)) for drift in job.checked().drifts for _ in drift.layers]
    found = ranks(job.ranks).call(kept, job)
    apart: list[list[list[int]]] = []
    for key in sorted({key for each in found for key in each}):
        bits: dict[bytes, list[int]] = {}
        for rank, each in enumerate(found):
            if key in each:
                bits.setdefault(each[key], []).append(rank)
        if len(bits) > 1:
            apart.append(list(bits.values()))
    assert apart == groups
