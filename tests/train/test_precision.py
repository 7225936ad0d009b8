"""Lower precision on real processes: as near to the exact numbers as one device, in the bytes that are predicted."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardlab.check import drifts_of
from shardlab.common.errors import UserError
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.recording import step_with_memory
from shardlab.execute.settings import Settings
from shardlab.language import OpKind
from shardlab.language.tape import MemoryRecord
from shardlab.models import GPT, MLP
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.verification.cases import SHARDINGS, Case, named_cases
from shardlab.train.verification.verify import verify_rank
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
CPU = torch.device("cpu")
ALONE = {case.row: case for case in named_cases()}
SAMPLE = (
    "fsdp",
    "wsdp",
    "tensor-parallel",
    "expert-parallel",
    "zb-v",
)
"""One strategy for each way of exchanging what is rounded; plans below have replicas, states in slices and the ring."""

MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, ffn_hidden_size=2048)


@pytest.mark.parametrize("name", sampled(ALONE, SAMPLE.__contains__))
def test_every_strategy_in_bfloat16_is_as_exact_as_one_device(ranks: World, name: str) -> None:
    case = ALONE[name]
    verdict = ranks(case.ranks).call(verify_rank, CPU, replace(case.job(), precision="bf16"), 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize(
    ("sharding", "precision"),
    sampled(
        [
            ("zero-1", "fp32"),
            ("hsdp", "bf16-fp32-grads"),
            ("hsdp", "bf16-params"),
            ("tp+fsdp", "bf16-fp32-grads"),
            ("zero-1", "fp16"),
            ("cp", "bf16"),
            ("cp+tp+sp", "fp16"),
            ("ep+fsdp", "fp32"),
        ],
        lambda case: case[0] in ("hsdp", "zero-1", "cp"),
    ),
)
def test_every_precision_of_a_plan_is_as_exact_as_one_device(ranks: World, sharding: str, precision: str) -> None:
    plan = SHARDINGS[sharding]
    job = Case("none", sharding, plan, plan.mesh.world, 2, 2 * plan.data_ranks).job()
    verdict = ranks(job.ranks).call(verify_rank, CPU, replace(job, precision=precision), 2)[0]
    assert verdict.ok, verdict


def memory(rank: int, job: Job) -> tuple[int, int, dict[str, int]]:
    """Bytes of a rank as its loss begins: those predicted, those that were live, and what they were for."""
    checked = job.checked()
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, MODEL.seq_len), MODEL.seq_len, 2, job.microbatches, 0)
    executor = Executor(checked, rank, job.cut, batches, Settings(0, job.numbers, CPU, OptimizerConfig(ema=job.ema)))
    record = MemoryRecord()
    executor.step()
    step_with_memory(executor, record)
    predicted = memory_in_bytes(checked)[rank].before_ops
    at = next(at for at, op in enumerate(executor.state.tape) if op.kind is OpKind.LOSS)
    return predicted[at], sum(record.live[at].values()), record.live[at]


@pytest.mark.parametrize(
    ("strategy", "ema", "precision"),
    [
        *(("zero-3", None, precision) for precision in ("fp32", "bf16", "bf16-params", "bf16-fp32-grads", "fp16")),
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
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
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
    batches = Batches(Corpus.from_text(bytes(range(256)) * 8, 8), 8, 2, job.microbatches, 0)
    with pytest.raises(UserError, match="fp16 needs a program that passes the gradient's norm to its updates"):
        Executor(job.checked(), 0, job.cut, batches, Settings(0, job.numbers))


# In float32 on real processes, replicas that are said to drift do, and the others stay equal bit by bit.


PROGRAMS = Path(__file__).parents[1] / "check" / "drifting.py"
STEPS = 3


def kept_weights(rank: int, job: Job) -> dict[tuple[int, ...], bytes]:
    """The bits of the weights that a rank keeps after some steps, by layer and slices."""
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
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
    groups = [list(map(list, drift.groups)) for drift in drifts_of(job.checked()) for _ in drift.layers]
    weights_by_rank = ranks(job.ranks).call(kept_weights, job)
    apart: list[list[list[int]]] = []
    for key in sorted({key for weights in weights_by_rank for key in weights}):
        bits: dict[bytes, list[int]] = {}
        for rank, weights in enumerate(weights_by_rank):
            if key in weights:
                bits.setdefault(weights[key], []).append(rank)
        if len(bits) > 1:
            apart.append(list(bits.values()))
    assert apart == groups


# What is cut, sent and put together by hand gives one device's numbers on real processes.


ROOT = Path(__file__).parents[2]
SLICING = "tests/check/slicing_programs.py"


@pytest.mark.parametrize(
    ("strategy", "count"),
    [
        ("examples/ring_all_reduce.py:ring_all_reduce", 2),
        pytest.param("examples/ring_all_reduce.py:ring_all_reduce", 4, marks=pytest.mark.thorough),
        pytest.param("examples/halving_and_doubling.py:halving_and_doubling", 2, marks=pytest.mark.thorough),
        ("examples/halving_and_doubling.py:halving_and_doubling", 4),
        (f"{SLICING}:updates_in_chunks", 2),
        (f"{SLICING}:updates_as_chunks_come", 2),
        (f"{SLICING}:slices_of_a_gathered_weight", 4),
        (f"{SLICING}:a_rank_without_a_microbatch", 2),
        pytest.param(f"{SLICING}:a_rank_without_a_microbatch", 4, marks=pytest.mark.thorough),
        (f"{SLICING}:all_pairs_at_once", 2),
        pytest.param(f"{SLICING}:all_pairs_at_once", 4, marks=pytest.mark.thorough),
        ("tests/check/scaling_programs.py:mean_over_ranks", 2),
        ("tests/check/scaling_programs.py:sum_of_tokens", 2),
        ("tests/check/scaling_programs.py:means_weighted_by_tokens", 4),
        ("tests/check/casting_programs.py:gradients_in_half", 2),
        ("tests/check/casting_programs.py:weights_in_half", 2),
        ("tests/check/casting_programs.py:messages_in_half", 2),
        ("tests/check/offloading_programs.py:sums_away", 2),
        ("examples/offload.py:offload", 2),
        ("examples/gradients_in_half.py:gradients_in_half", 2),
        (f"{SLICING}:microbatches_apart_and_together", 2),
        (f"{SLICING}:sequence_parallel", 2),
        (f"{SLICING}:context_parallel", 2),
    ],
)
def test_programs_by_hand_give_the_numbers_of_one_device(ranks: World, strategy: str, count: int) -> None:
    model = GPT(layers=2, hidden_size=16, heads=4, seq_len=8, dropout=0.1)
    job = Job(f"{ROOT}/{strategy}", count, 4, model, 2, "fp64", ema=0.7)
    verdict = ranks(count).call(verify_rank, CPU, job, 2)[0]
    assert verdict.ok, verdict


@pytest.mark.parametrize("program", ["gradients_in_half", "weights_in_half", "messages_in_half"])
def test_casts_round_on_the_tape(ranks: World, program: str) -> None:
    """Half precision has 8 or 11 bits: errors are as large as its rounding, and no larger than some of them."""
    model = GPT(layers=2, hidden_size=16, heads=4, seq_len=8)
    job = Job(f"{ROOT}/tests/check/casting_programs.py:{program}", 2, 4, model, 2, "fp32")
    verdict = ranks(2).call(verify_rank, CPU, job, 1)[0]
    assert 2**-13 < verdict.gradient_error < 2**-5, verdict
