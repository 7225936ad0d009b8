"""What lies elsewhere, and collectives that run as one, give one device's numbers on real processes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.collect import step_with_memory
from shardlab.language import OpKind
from shardlab.language.pass_names import with_offload
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
MODEL = GPT(layers=3, hidden_size=32, heads=4, seq_len=16)


@pytest.mark.parametrize(
    "words",
    [
        ["parameters=disk", "optimizer=disk", "activations=disk"],
        ["parameters=host", "optimizer=host", "gradients=host"],
    ],
)
@pytest.mark.parametrize("strategy", ["fsdp", "zero-1", "1f1b"])
def test_what_lies_elsewhere_is_trained_like_one_device(ranks: World, strategy: str, words: list[str]) -> None:
    job = Job(strategy, 2, 4, MODEL, 2, "fp64", passes=with_offload(None, words))
    kinds = {op.kind for tape in job.checked().program.tapes for op in tape}
    assert OpKind.RELOAD in kinds
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    "passes", ["fuse-steps=1", "fuse-steps=2", "bucket=2,fuse-steps=8", "update-early,fuse-steps=1"]
)
def test_weights_carried_from_step_to_step_give_one_devices_numbers(ranks: World, passes: str) -> None:
    for strategy in ("fsdp", "zero-3")[: 1 if "update" in passes else 2]:
        verdict = ranks(2).call(verify_rank, CPU, Job(strategy, 2, 4, MODEL, 2, "fp64", passes=passes), 3)[0]
        assert verdict.ok, verdict


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero-1", "zero-3"])
def test_buckets_give_one_devices_numbers(ranks: World, strategy: str) -> None:
    job = Job(strategy, 2, 4, MODEL, 2, "fp64", passes="bucket=1")
    assert any(op.batch >= 0 for tape in job.checked().program.tapes for op in tape)
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


PROGRAMS = Path(__file__).with_name("bucketed_programs.py")


def test_a_gradient_that_is_read_again_is_not_written_over(ranks: World) -> None:
    """Its first sum is only looked at."""
    job = Job(f"{PROGRAMS}:twice", 2, 4, MODEL, 2, "fp64", passes="bucket=2")
    assert any(op.batch >= 0 for tape in job.checked().program.tapes for op in tape)
    verdict = ranks(2).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


def test_weights_of_slices_that_lie_apart_are_handed_on_when_they_are_stepped(ranks: World) -> None:
    verdict = ranks(2).call(verify_rank, CPU, Job(f"{PROGRAMS}:apart", 2, 4, MODEL, 2, "fp64"), 3)[0]
    assert verdict.ok, verdict


def memory(rank: int, job: Job) -> tuple[int, int]:
    """The most bytes of a rank as an op starts: those predicted, and those live in the quietest of some steps.

    Gloo's threads let go of a tensor a little after it has been sent, so a step may have more.
    """
    gc.collect()  # what an earlier executor has left is not this one's
    checked = job.checked()
    batches = Batches(Corpus.split(bytes(range(256)) * 8, MODEL.seq_len), MODEL.seq_len, 2, job.microbatches, 0)
    executor = Executor(checked, rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig()))
    executor.step()
    live: list[int] = []
    for _ in range(3):
        record = MemoryRecord()
        step_with_memory(executor, record)
        live.append(max(sum(each.values()) for each in record.live.values()))
    return max(memory_in_bytes(checked)[rank].before), min(live)


@pytest.mark.parametrize(
    ("strategy", "passes"),
    [("ddp", "bucket=1"), ("fsdp", "none"), ("fsdp", "bucket=1"), ("zero-1", "bucket=1"), ("zero-3", "fuse-steps=2")],
)
def test_passes_take_the_memory_that_is_predicted(ranks: World, strategy: str, passes: str) -> None:
    for predicted, live in ranks(2).call(memory, Job(strategy, 2, 2, MODEL, 2, "fp32", passes=passes)):
        assert live == pytest.approx(predicted, rel=0.02)
