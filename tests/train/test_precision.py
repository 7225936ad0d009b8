"""Lower precision on real processes: as near to the exact numbers as one device, in the bytes that are predicted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardlab.common.errors import UserError
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.collect import step_with_memory
from shardlab.language import OpKind
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.verification.cases import SHARDINGS, Case, alone
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

pytestmark = pytest.mark.xdist_group("ranks")
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
ALONE = {case.row: case for case in alone()}
SAMPLE = (
    "ddp",
    "zero-1",
    "fsdp",
    "wsdp",
    "tensor-parallel",
    "context-parallel",
    "expert-parallel",
    "1f1b",
    "zb-v",
    "3d",
)
"""One strategy for each way of exchanging what is rounded."""

MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, ffn_hidden_size=2048)


@pytest.mark.parametrize("name", sampled(ALONE, SAMPLE.__contains__))
def test_every_strategy_in_bfloat16_is_as_exact_as_one_device(ranks: World, name: str) -> None:
    case = ALONE[name]
    verdict = ranks(case.ranks).call(verify_rank, CPU, replace(case.job(), precision="bf16"), 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("sharding", "precision"),
    [
        ("zero-1", "fp32"),
        ("hsdp", "bf16-fp32-grads"),
        ("tp+fsdp", "bf16-fp32-grads"),
        ("zero-1", "fp16"),
        ("cp+tp+sp", "fp16"),
        ("ep+fsdp", "fp32"),
    ],
)
def test_every_precision_of_a_plan_is_as_exact_as_one_device(ranks: World, sharding: str, precision: str) -> None:
    plan = SHARDINGS[sharding]
    job = Case("none", sharding, plan, plan.mesh.world, 2, 2 * plan.data_ranks).job()
    verdict = ranks(job.ranks).call(verify_rank, CPU, replace(job, precision=precision), 2)[0]
    assert verdict.ok, verdict


def memory(rank: int, job: Job) -> tuple[int, int, dict[str, int]]:
    """Bytes of a rank as its loss begins: those predicted, those that were live, and what they were for."""
    checked = job.checked()
    batches = Batches(Corpus.split(bytes(range(256)) * 8, MODEL.seq_len), MODEL.seq_len, 2, job.microbatches, 0)
    executor = Executor(checked, rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig(ema=job.ema)))
    record = MemoryRecord()
    executor.step()
    step_with_memory(executor, record)
    predicted = memory_in_bytes(checked)[rank].before
    at = next(at for at, op in enumerate(executor.state.tape) if op.kind is OpKind.LOSS)
    return predicted[at], sum(record.live[at].values()), record.live[at]


@pytest.mark.parametrize(
    ("strategy", "ema", "precision"),
    [
        *(("zero-3", None, precision) for precision in ("fp32", "bf16", "bf16-fp32-grads", "fp16")),
        ("zero-1", None, "bf16"),
        ("zero-1", 0.9, "bf16"),
    ],
)
def test_memory_in_a_precision_is_what_is_predicted(
    ranks: World, strategy: str, ema: float | None, precision: str
) -> None:
    job = Job(strategy, 2, 2, GPT(layers=2, hidden_size=64, heads=2, seq_len=8), 2, precision, ema=ema)
    for predicted, live, by_category in ranks(2).call(memory, job):
        assert live == pytest.approx(predicted, rel=0.02), by_category


def scales(rank: int, poison: float) -> tuple[list[float], bool]:
    """The scales of losses of four steps, of which the second overflows on rank 1 alone, and whether that moved any."""
    job = Job(SHARDINGS["zero-2"], 2, 2, MODEL, 2, "fp16")
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig(clip=1.0)))
    state = executor.state
    at, op = next((at, op) for at, op in enumerate(state.tape) if op.kind.value == "backward")
    healthy = executor.instructions[at]

    def poisoned() -> None:
        healthy()
        state.values[op.outputs[0]][3] = poison

    seen: list[float] = []
    moved = False
    for step in range(4):
        executor.instructions[at] = poisoned if rank == step == 1 else healthy
        before = [tensor.clone() for tensor in state.kept.values()]
        executor.step()
        if step == 1:
            moved = not all(map(torch.equal, before, state.kept.values()))
        seen.append(state.loss_scale.scale)
    return seen, moved


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all_and_halves_their_scale(ranks: World) -> None:
    for seen, moved in ranks(2).call(scales, float("inf")):
        assert seen == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
        assert not moved


def test_float16_wants_a_program_that_knows_of_overflows() -> None:
    job = Job("single", 1, 1, MODEL, 2, "fp16")
    batches = Batches(Corpus.split(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    with pytest.raises(UserError, match="fp16 needs a program that gives updates the gradient's norm"):
        Executor(job.checked(), 0, job.cut, batches, Settings(0, job.numbers))
