"""A text written by all ranks is the one that a single device writes, and every rank knows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from shardlab.common.errors import UserError
from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.models.tensors import TextGenerator, TokenSampling, initial_weights
from shardlab.models.tensors.layers import TensorLayer
from shardlab.strategies import Plan
from shardlab.train import sample
from shardlab.train.job import Job
from shardlab.train.sample import ParallelWriter, for_text
from tests.support.ranks import Ranks
from tests.support.thorough import sampled
from tests.train.test_evaluate import JOBS, batches_of, is_in_sample
from tests.train.verify_cases import DROPS

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
PROMPT = [1, 2, 3]


def writer_of(rank: int, job: Job, choice: TokenSampling, asked: bool = False) -> ParallelWriter:
    settings = Settings(job.seed, job.numbers, CPU)
    executor = Executor(job.checked(), rank, job.cut, batches_of(job), settings)
    return ParallelWriter(executor.state, job.model, choice, lambda: asked)


def written(rank: int, job: Job, choice: TokenSampling, count: int) -> list[int]:
    return list(writer_of(rank, job, choice).generate(PROMPT, count))


def alone(job: Job, choice: TokenSampling, count: int) -> list[int]:
    flats = [initial_weights(job.model, layer, job.seed, torch.float64) for layer in range(job.model.layers)]
    return list(TextGenerator(for_text(job.model), flats, choice).generate(PROMPT, count))


ODD = {
    "a rank without blocks": Job(Plan(Mesh(dp_shard=4)), 4, 4, GPT(layers=3, hidden_size=16, heads=2, seq_len=8), 1),
    "two blocks on the last rank": Job("fsdp", 2, 2, GPT(layers=3, hidden_size=16, heads=2, seq_len=8), 1),
}


@pytest.mark.parametrize("name", sampled((name for name in (*JOBS, *ODD) if name != "fp16"), is_in_sample))
def test_every_rank_draws_what_one_device_draws(ranks: World, name: str) -> None:
    """Also beyond the model's positions."""
    job, choice = {**JOBS, **ODD}[name], TokenSampling(temperature=0.7, seed=3)
    count = job.model.seq_len + 2
    assert ranks(job.ranks).call(written, job, choice, count) == [alone(job, choice, count)] * job.ranks


def asked_on_one_rank(rank: int, job: Job) -> int:
    with patch.object(sample, "HURRY", 0.0):
        return len(list(writer_of(rank, job, TokenSampling(), asked=rank == 1).generate(PROMPT, 10**6)))


def test_a_rank_that_is_asked_to_end_ends_the_text_on_all(ranks: World) -> None:
    job = JOBS["fsdp"]
    assert ranks(job.ranks).call(asked_on_one_rank, job) == [0] * job.ranks


def read_at_once(rank: int, job: Job) -> list[int]:
    """How many tokens this rank's blocks compute with each time, for a text that fits the model's positions."""
    token_counts: list[int] = []

    def run(self: TensorLayer, weights: Sequence[Tensor], inputs: Sequence[Tensor], *more: Any, **named: Any) -> Any:
        token_counts.append(inputs[0].shape[1])
        return of_layer(self, weights, inputs, *more, **named)

    of_layer = TensorLayer.run
    with patch.object(TensorLayer, "run", run):
        written(rank, job, TokenSampling(), 4)
    return token_counts


@pytest.mark.parametrize("name", ["fsdp", "cp", "tp of a tied head"])
def test_each_block_is_computed_on_one_rank_and_after_the_prompt_for_the_new_token_alone(
    ranks: World, name: str
) -> None:
    job = JOBS[name]
    counts_by_rank = [counts for counts in ranks(job.ranks).call(read_at_once, job) if counts]
    blocks = [len(counts) // 4 for counts in counts_by_rank]
    assert sum(blocks) == job.model.layers
    assert counts_by_rank == [count * [len(PROMPT)] + count * 3 * [1] for count in blocks]


def refused(rank: int, job: Job) -> str:
    """Return the error for a model whose last rank has weights that are NaN."""
    executor = Executor(job.checked(), rank, job.cut, batches_of(job), Settings(job.seed, job.numbers, CPU))
    for weights in executor.state.kept.values():
        weights.fill_(float("nan") if rank == job.ranks - 1 else 1.0)
    with pytest.raises(UserError) as refusal:
        list(ParallelWriter(executor.state, job.model, TokenSampling(), lambda: False).generate(PROMPT, 2))
    return str(refusal.value)


def test_weights_that_are_nan_are_reported_on_every_rank(ranks: World) -> None:
    for said in ranks(2).call(refused, Job(Plan(Mesh(pp=2), "1f1b"), 2, 4, DROPS, 2)):
        assert "its weights have diverged" in said
