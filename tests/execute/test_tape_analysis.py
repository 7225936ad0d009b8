"""Steps whose buffers lie in one arena: the same numbers, to the bit, and no more memory."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple
from unittest.mock import Mock

import pytest
import torch

from shardlab.check import Checked, check
from shardlab.execute.executor import Executor
from shardlab.execute.recording import step_with_memory
from shardlab.execute.settings import Settings
from shardlab.execute.state import State
from shardlab.execute.tape_analysis import ArenaTensors
from shardlab.language import Mesh, Sizes, Spec, trace
from shardlab.language.tape import MemoryRecord
from shardlab.measure.side_by_side.contender import DrawnBatches, LiveStorages
from shardlab.models import GPT, MoE
from shardlab.simulate.passes import run_named
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.strategies.ddp import ddp
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

World = Callable[[int], Ranks]
MODEL = GPT(layers=3, hidden_size=32, heads=2, vocab_size=32, seq_len=16)


class Steps(NamedTuple):
    """Results of some steps: losses, weights, the most bytes of storages, and those of the arena."""

    losses: list[float]
    weights: torch.Tensor
    peak: int
    arena: int


def steps_of(rank: int, job: Job, program: Checked) -> Steps:
    storages = LiveStorages()
    with storages.tracking():
        batches = DrawnBatches(job.micro_batch_size, job.microbatches, MODEL.seq_len, MODEL.vocab_size)
        executor = Executor(program, rank, job.cut, batches, Settings(precision=job.numbers))
        losses = [float(executor.step()[0]) for _ in range(2)]
        storages.peak = storages.live
        losses.append(float(executor.step()[0]))
    weights = torch.cat([weight.flatten() for weight in executor.state.kept.values()])
    return Steps(losses, weights, storages.peak, executor.state.arena.whole.nbytes)


def with_and_without(rank: int, job: Job, passes: str) -> tuple[Steps, Steps]:
    original = run_named(job.checked(), passes)[-1].checked
    with_arena = run_named(original, "arena")[-1].checked
    plain = steps_of(rank, job, original)
    gc.collect()
    return plain, steps_of(rank, job, with_arena)


@pytest.mark.parametrize("axis", ["cp", "tp"])
def test_layers_without_parameters_are_not_in_the_arena(axis: str) -> None:
    """Such as sums of experts; an offset of no bytes says nothing."""
    model = MoE(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=32)
    job = Job(Plan(Mesh(**{"ep": 2, axis: 2})), 4, 4, model, 2, passes="arena")
    checked, empty = job.checked(), {l for l, weights in enumerate(job.sizes.weights) if not weights}
    for rank, specs in enumerate(checked.specs):
        arena = State(checked, rank, job.cut, 2, Settings(), None).arena
        layers = {specs[number].layer for number in arena.tensors}
        assert layers
        assert empty
        assert not layers & empty


def test_a_layer_without_parameters_takes_no_bytes_in_a_bucket_of_others() -> None:
    sizes = Sizes.puzzle(3)
    sizes = replace(sizes, weights=(0, *sizes.weights[1:]))
    program = run_named(check(trace(ddp, 2, sizes, 2)), "bucket=1,arena")[-1].checked

    def shape(spec: Spec) -> tuple[int]:
        return (sizes.weights[spec.layer],)

    shapes = Mock(shape=shape)
    arena = ArenaTensors(program, 0, shapes, lambda _: torch.float32, torch.device("cpu"), None)
    assert arena.whole.nbytes == 4 * sum(sizes.weights)
    lengths = {program.specs[0][number].layer: len(tensor) for number, tensor in arena.tensors.items()}
    assert lengths == dict(enumerate(sizes.weights))
    assert {len(whole) for whole in arena.side_by_side.values()} == {sum(sizes.weights)}


def test_gradients_lie_side_by_side_where_other_values_are_wider_than_they() -> None:
    sizes = Sizes.puzzle(6)
    program = run_named(check(trace(ddp, 2, sizes, 2)), "bucket=3,arena")[-1].checked

    def dtype(spec: Spec) -> torch.dtype:
        return torch.float64 if spec.layer >= 4 else torch.float32

    def shape(spec: Spec) -> tuple[int]:
        return (sizes.weights[spec.layer],)

    arena = ArenaTensors(program, 0, Mock(shape=shape), dtype, torch.device("cpu"), None)
    ends: dict[int, int] = {}
    for number, tensor in arena.tensors.items():
        whole = arena.side_by_side[number].data_ptr()
        assert tensor.data_ptr() == ends.get(whole, whole)
        ends[whole] = tensor.data_ptr() + tensor.nbytes
    assert len(ends) == 2


@pytest.mark.parametrize(
    ("name", "precision", "passes"),
    sampled(
        [
            ("zero-2", "fp32", "bucket=2"),
            ("zero-3", "bf16", "none"),
            ("fsdp", "fp64", "prefetch=1"),
            ("1f1b", "bf16", "receive-early=2"),
            ("tensor-parallel", "fp32", "none"),
        ],
        lambda case: case[0] in ("zero-2", "zero-3", "1f1b"),
    ),
)
def test_an_arena_changes_no_bit_and_takes_no_more_memory(ranks: World, name: str, precision: str, passes: str) -> None:
    job = Job(name, 2, 4, MODEL, 2, precision)
    for plain, with_arena in ranks(2).call(with_and_without, job, passes):
        assert plain.losses == with_arena.losses
        assert torch.equal(plain.weights, with_arena.weights)
        assert with_arena.arena > plain.arena == 0
        assert with_arena.peak <= 1.06 * plain.peak  # within an op tensors come and go that no value stands for


def tracked(rank: int, job: Job) -> tuple[list[int], list[int]]:
    """Bytes at the start of each op: predicted, and as storages are tracked in a step."""
    program = run_named(job.checked(), "arena")[-1].checked
    batches = DrawnBatches(job.micro_batch_size, job.microbatches, MODEL.seq_len, MODEL.vocab_size)
    executor = Executor(program, rank, job.cut, batches, Settings())
    for _ in range(2):
        executor.step()
    record = MemoryRecord()
    step_with_memory(executor, record)
    assert record.live[len(executor.state.tape) - 1]["arena"] == executor.state.arena.whole.nbytes
    return memory_in_bytes(program)[rank].before_ops, [sum(live.values()) for _, live in sorted(record.live.items())]


@pytest.mark.parametrize("name", ["zero-3", "1f1b"])
def test_an_arena_is_part_of_the_memory_that_is_predicted(ranks: World, name: str) -> None:
    for predicted, measured in ranks(2).call(tracked, Job(name, 2, 4, MODEL, 2)):
        assert max(measured) == pytest.approx(max(predicted), rel=0.02)
