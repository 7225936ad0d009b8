"""A text written by all ranks is the one that a single device writes, and every rank knows it."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from shardlab.execute import Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.models.tensors import Choice, Writer, initial_weights
from shardlab.program import Mesh, OpKind
from shardlab.strategies import Plan
from shardlab.train import parallel_writer
from shardlab.train.job import Job
from shardlab.train.parallel_writer import ParallelWriter
from shardlab.train.sample import for_text
from tests.support.ranks import Ranks
from tests.train.test_evaluate import JOBS, batches_of
from tests.train.verify_cases import DROPS

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
PROMPT = [1, 2, 3]
GROUPS: Groups = {}


def writer_of(rank: int, job: Job, choice: Choice, asked: bool = False) -> ParallelWriter:
    checked = job.checked()
    executor = Executor(checked, rank, job.cut, batches_of(job), Settings(job.seed, job.numbers, CPU), groups=GROUPS)
    return ParallelWriter(job, checked, executor.state, choice, lambda: asked, GROUPS)


def written(rank: int, job: Job, choice: Choice, count: int) -> list[int]:
    return list(writer_of(rank, job, choice).go_on(PROMPT, count))


def alone(job: Job, choice: Choice, count: int) -> list[int]:
    flats = [initial_weights(job.model, layer, job.seed, torch.float64) for layer in range(job.model.layers)]
    return list(Writer(for_text(job.model), flats, choice).go_on(PROMPT, count))


@pytest.mark.parametrize("name", [name for name in JOBS if name != "fp16"])
def test_every_rank_draws_what_one_device_draws(ranks: World, name: str) -> None:
    """Also beyond the model's positions."""
    job, choice = JOBS[name], Choice(temperature=0.7, seed=3)
    count = job.model.seq_len + 2
    assert ranks(job.ranks).call(written, job, choice, count) == [alone(job, choice, count)] * job.ranks


def asked_on_one_rank(rank: int, job: Job) -> int:
    with patch.object(parallel_writer, "HURRY", 0.0):
        return len(list(writer_of(rank, job, Choice(), asked=rank == 1).go_on(PROMPT, 10**6)))


def test_a_rank_that_is_asked_to_end_ends_the_text_on_all(ranks: World) -> None:
    job = JOBS["fsdp"]
    assert ranks(job.ranks).call(asked_on_one_rank, job) == [0] * job.ranks


def kinds(rank: int, job: Job) -> list[OpKind]:
    return [op.kind for op in writer_of(rank, job, Choice())._executor.state.tape]


def test_other_microbatches_are_not_computed(ranks: World) -> None:
    """In a pipeline one forward pass of each layer, and nothing on a rank that has other data and all weights."""
    job = Job(Plan(Mesh(pp=2), "1f1b"), 2, 4, DROPS, 2)
    layers = job.checked().program.layers
    assert sum(each.count(OpKind.FORWARD) for each in ranks(2).call(kinds, job)) == layers
    first, second = ranks(2).call(kinds, Job(Plan(Mesh(dp_replicate=2)), 2, 4, DROPS, 2))
    assert (first.count(OpKind.FORWARD), second) == (layers, [])
