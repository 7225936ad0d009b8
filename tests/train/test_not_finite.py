"""A gradient that is not finite, on one rank alone, leaves out the step on all: the norm carries it to every update."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.language import OpKind
from shardlab.language.precision import FP64
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks
from tests.train import user_programs

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)


def after_a_gradient_that_is_not_finite(rank: int, job: Job, poison: float) -> tuple[bool, bool, bool]:
    """Whether a step with such a gradient on rank 1 alone changed weights and states, and whether the next step did."""
    checked = job.checked()
    corpus = Corpus.split(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    settings = Settings(0, FP64, optimizer=OptimizerConfig(schedule_steps=3, warmup_steps=1, clip=1.0))
    executor = Executor(checked, rank, job.model, batches, settings)
    state = executor.state

    def everything() -> list[torch.Tensor]:
        tensors = [moment for part in state.opt_states.values() for moment in part.moments]
        return [tensor.clone() for tensor in [*state.kept.values(), *tensors]]

    def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
        return all(torch.equal(one, other) for one, other in zip(a, b, strict=True))

    executor.step()
    before = everything()
    at, op = next((at, op) for at, op in enumerate(state.tape) if op.kind in (OpKind.BACKWARD, OpKind.BACKWARD_WEIGHT))
    healthy = executor.instructions[at]

    def poisoned() -> None:
        healthy()
        state.values[op.outputs[0]][3] = poison

    if rank == 1:
        executor.instructions[at] = poisoned
    executor.step()
    after = everything()
    executor.instructions[at] = healthy
    executor.step()
    return same(before, after), same(after, everything()), all(t.isfinite().all() for t in everything())


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("function", ["zero_1", "split_fsdp", "split_pipeline"])
def test_a_gradient_that_is_not_finite_on_one_rank_leaves_every_rank_as_it_was(
    ranks: World, function: str, poison: float
) -> None:
    job = Job(f"{user_programs.__file__}:{function}", 2, 2, MODEL, 2, "fp64")
    for unchanged, stuck, finite in ranks(2).call(after_a_gradient_that_is_not_finite, job, poison):
        assert unchanged, "the step was left out"
        assert not stuck, "the next one was not"
        assert finite
