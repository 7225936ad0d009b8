"""Layers' passes on a rank's tape, and the views of their gradients."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardlab.execute.compute_ops import DeferredGradients, gradient_views
from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.language import Kind, Mesh, OpKind
from shardlab.models import GPT, Blocks, Llama, MoE
from shardlab.strategies import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]

MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)
GRADIENTS = (Kind.GRAD_ACTIVATION, Kind.GRAD_RESIDUAL)
BACKWARDS = (OpKind.BACKWARD, OpKind.BACKWARD_INPUT)
HALVES = Plan(Mesh(pp=2, tp=2), schedule="zb-h1", sequence_parallel=True)


def executor_of(rank: int, job: Job) -> Executor:
    corpus = Corpus.from_text(bytes(range(256)) * 4, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    return Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers))


def shared_gradients(rank: int, job: Job) -> tuple[int, list[str]]:
    """How many backward passes there were in a step, and those that gave a gradient which shares its
    memory with another value, or with what the second half of the pass reads."""
    executor = executor_of(rank, job)
    state, shared = executor.state, list[str]()
    count = 0

    def watch(at: int, instruction: Callable[[], None]) -> Callable[[], None]:
        op = state.tape[at]
        gradients = [number for number in op.outputs if state.specs[number].kind in GRADIENTS and op.layer > 0]

        def run() -> None:
            nonlocal count
            instruction()
            count += len(gradients)
            others: list[Any] = [value for number, value in enumerate(state.values) if number not in gradients]
            if op.kind is OpKind.BACKWARD_INPUT:
                deferred: DeferredGradients = state.values[op.outputs[-1]]
                others += [tensor for _, *pair in deferred for tensor in pair]
            memories = {other.untyped_storage().data_ptr() for other in others if isinstance(other, Tensor)}
            for number in gradients:
                memory = state.values[number].untyped_storage().data_ptr()
                if memory in memories:
                    shared.append(str(op))
                memories.add(memory)

        return run if op.kind in BACKWARDS else instruction

    executor.instructions = [watch(at, instruction) for at, instruction in enumerate(executor.instructions)]
    executor.step()
    return count, shared


@pytest.mark.parametrize(
    ("strategy", "size", "model"),
    [
        ("ddp", 2, MODEL),
        ("tensor-parallel", 2, MODEL),
        (HALVES, 4, MODEL),
        (HALVES, 4, Llama(layers=2, hidden_size=16, heads=2, seq_len=8, dropout=0.1)),
        (Plan(Mesh(pp=2), schedule="zb-h1"), 2, MoE(layers=4, hidden_size=16, heads=2, seq_len=8)),
        (Plan(Mesh(ep=2)), 2, MoE(layers=2, hidden_size=16, heads=2, seq_len=8)),
    ],
    ids=str,
)
def test_a_gradient_is_memory_of_its_own(ranks: World, strategy: str | Plan, size: int, model: Blocks) -> None:
    for count, shared in ranks(size).call(shared_gradients, Job(strategy, size, 4, model, 2)):
        assert count
        assert not shared


LAYOUT = GPT(layers=2, hidden_size=16, heads=2, seq_len=8).layout(1)


def test_every_microbatch_adds_to_the_same_views_of_a_gradient() -> None:
    gradient = torch.zeros(LAYOUT.numel)
    views = gradient_views(gradient, LAYOUT)
    assert gradient_views(gradient, LAYOUT) is views
    for view in views:
        view.add_(1)
    assert gradient.sum() == LAYOUT.parameter_count


def test_a_gradient_goes_although_its_views_are_kept_with_it() -> None:
    gradient = torch.zeros(LAYOUT.numel)
    views = weakref.ref(gradient_views(gradient, LAYOUT)[0])
    memory = weakref.ref(gradient)
    del gradient
    assert memory() is None
    assert views() is None
