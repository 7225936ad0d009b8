"""A rank whose weights or results are no longer what they should be is named within the steps between two audits."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from shardlab.check.replicas import compared_ranks, replicas_of, results_of
from shardlab.common.errors import UserError
from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.models import GPT, MLP
from shardlab.strategies.plan.plan import Plan
from shardlab.train.audit import Audit, Auditing, advice, hash_of
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from tests.support.ranks import Ranks
from tests.support.thorough import sampled

pytestmark = pytest.mark.starts_ranks

STEPS = 4


def job_of(strategy: str | Plan, ranks: int, precision: str = "fp32", dropout: float = 0.0) -> Job:
    model = GPT(layers=2, hidden_size=16, heads=2, seq_len=8, vocab_size=256, dropout=dropout)
    return Job(strategy, ranks, 4 if ranks != 3 else 3, model, 1, precision)


def executor_of(rank: int, job: Job) -> Executor:
    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    return Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers))


def faults(rank: int, job: Job, wrong: str, culprit: int) -> list[str]:
    """Return the results of audits after some steps. A fault occurs on one rank before the third step."""
    executor = executor_of(rank, job)
    audit = Audit(executor)
    errors: list[str] = []
    for step in range(STEPS):
        if step == 2 and rank == culprit:
            spoil(executor, audit, wrong)
        executor.step()
        errors.append(audit.find_fault())
    return errors


def spoil(executor: Executor, audit: Audit, wrong: str) -> None:
    if wrong == "weight":
        flip(next(iter(executor.state.kept.values())), 21)
    elif wrong != "nothing":
        flip_result(executor, audit, once=wrong == "once")


def flip(tensor: Tensor, bit: int) -> None:
    """Flip a bit of the first number."""
    tensor.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << bit)


def flip_result(executor: Executor, audit: Audit, *, once: bool) -> None:
    """Have layer 1, or the rank's first one, err in its forward pass from now on, or in the next audit alone."""
    forward = {op.layer: at for at, op in reversed(list(enumerate(executor.state.tape))) if op.kind.value == "forward"}
    at = forward.get(1, forward[min(forward)])
    instructions, number = audit._instructions, executor.state.tape[at].outputs[0]  # pyright: ignore[reportPrivateUsage]
    plain, prints = executor.instructions[at], audit._recorded  # pyright: ignore[reportPrivateUsage]
    right = instructions[at]
    print_of = audit._fingerprint  # pyright: ignore[reportPrivateUsage]

    def run() -> None:
        plain()
        flip(executor.state.values[number], 30)
        prints.append(print_of(executor.state.values[number]))
        prints.extend([(0.0, 0.0)] * (len(executor.state.tape[at].outputs) - 1))
        if once:
            instructions[at] = right

    instructions[at] = run


Make = Callable[[int], Ranks]


@pytest.mark.parametrize("strategy", ["ddp", "zero-1", "fsdp", "tensor-parallel", "1f1b"])
def test_an_audit_finds_nothing_where_nothing_is_wrong(ranks: Make, strategy: str) -> None:
    assert ranks(2).call(faults, job_of(strategy, 2), "nothing", 0) == [[""] * STEPS] * 2


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        ({"dp_shard": 2, "tp": 2}, "fp32"),
        ({"dp_replicate": 2, "pp": 2}, "bf16"),
        ({"dp_replicate": 2, "dp_shard": 2}, "bf16"),
    ],
)
def test_an_audit_finds_nothing_in_a_plan_of_several_axes(ranks: Make, mesh: dict[str, int], precision: str) -> None:
    job = job_of(Plan.from_dict({"mesh": mesh}), 4, precision, dropout=0.1)
    assert ranks(4).call(faults, job, "nothing", 0) == [[""] * STEPS] * 4


IN_PARTS = "tests/check/right_programs.py:kept_in_parts"


def test_a_copy_that_a_rank_keeps_in_parts_is_compared_with_a_whole_one(ranks: Make) -> None:
    for errors in ranks(2).call(faults, job_of(IN_PARTS, 2), "weight", 1):
        assert errors[:2] == ["", ""]
        assert errors[2].startswith("the copies of weights[0] are not bitwise equal: rank 0 and rank 1 differ")


def test_a_flipped_bit_in_a_weight_names_the_rank_that_differs_from_the_others(ranks: Make) -> None:
    for errors in ranks(3).call(faults, job_of("ddp", 3), "weight", 1):
        assert errors[:2] == ["", ""]
        assert errors[2] == "the copies of weights[0] are not bitwise equal: rank 1 differs from ranks 0, 2"


def test_of_two_copies_both_are_named(ranks: Make) -> None:
    for errors in ranks(2).call(faults, job_of("ddp", 2), "weight", 1):
        assert errors[2].startswith("the copies of weights[0] are not bitwise equal: rank 0 and rank 1 differ")


def test_a_rank_that_computes_wrongly_is_named_with_the_op(ranks: Make) -> None:
    """Weights that are sharded have no copies: only recomputation can tell."""
    for errors in ranks(3).call(faults, job_of("fsdp", 3), "always", 2):
        assert errors[2] == (
            "one microbatch, computed by all ranks, gives different results in forward(layer 1): "
            "rank 2 differs from ranks 0-1"
        )


def test_of_two_ranks_a_recomputation_sides_with_one(ranks: Make) -> None:
    for errors in ranks(2).call(faults, job_of("fsdp", 2), "once", 0):
        assert errors[2].endswith(
            "in forward(layer 1): rank 0 agrees with the others on recomputation: its first result was wrong"
        )


def test_a_rank_is_not_named_for_what_comes_of_the_error_of_another_stage(ranks: Make) -> None:
    """The gradients that the first stage gets are wrong as well, and their ranks come first."""
    job = job_of(Plan.from_dict({"mesh": {"dp_replicate": 2, "pp": 2}}), 4)
    tapes = job.checked().program.tapes
    last_stage = [rank for rank, tape in enumerate(tapes) if any(op.kind.value == "loss" for op in tape)]
    for errors in ranks(4).call(faults, job, "once", last_stage[-1]):
        odd = f"rank {last_stage[-1]} gets different results for the same input"
        assert errors[2].endswith(f"in forward(layer 1): {odd}")


def unchanged(rank: int, job: Job) -> bool:
    """Whether a training goes on from an audit bit by bit as without it."""
    plain, audited = executor_of(rank, job), executor_of(rank, job)
    audit = Audit(audited)
    for _ in range(STEPS):
        plain.step()
        audited.step()
        audit.find_fault()
    pairs = zip(plain.state.kept.values(), audited.state.kept.values(), strict=True)
    return all(hash_of(one) == hash_of(other) for one, other in pairs)


OFFLOADING = [f"tests/check/offloading_programs.py:{name}" for name in ("offloaded", "state_away", "weights_away")]


@pytest.mark.parametrize(
    "strategy",
    sampled(
        ["ddp", "zero-1", "fsdp", "tensor-parallel", "1f1b", *OFFLOADING],
        {"zero-1", "tensor-parallel", "1f1b", OFFLOADING[-1]}.__contains__,
    ),
)
def test_an_audit_changes_no_bit_of_what_is_trained(ranks: Make, strategy: str) -> None:
    assert all(ranks(2).call(unchanged, job_of(strategy, 2, dropout=0.1)))


def stopped(rank: int, job: Job) -> str:
    executor = executor_of(rank, job)
    auditing = Auditing([Audit(executor)], 2, lambda: "nothing is saved")
    if rank == 0:
        flip(next(iter(executor.state.kept.values())), 21)
    training = Mock(state=executor.state)
    executor.step()
    auditing.on_step_end(training)
    executor.step()
    try:
        auditing.on_step_end(training)
    except UserError as error:
        return str(error)
    except SystemExit as error:
        return f"exit {error.code}"
    return ""


def test_a_fault_ends_the_run_on_all_ranks_after_the_audited_step(ranks: Make) -> None:
    sentence, *others = ranks(3).call(stopped, job_of("ddp", 3))
    assert sentence.startswith("the audit after step 2 found a silent fault: the copies of weights[0] are not")
    assert "equal: rank 0 differs from ranks 1-2. Training has stopped; nothing is saved." in sentence
    assert others == ["exit 1", "exit 1"]


def test_replicas_that_may_drift_are_no_fault_of_a_host(ranks: Make) -> None:
    model = MLP(layers=3, hidden_size=16, seq_len=16, vocab_size=256)
    job = Job("tests/check/drifting.py:fused_on_one_rank", 2, 4, model, 2, "fp32")
    assert ranks(2).call(faults, job, "nothing", 0) == [[""] * STEPS] * 2
    assert advice(job.checked()).startswith("It may be rounding, and no host's fault: replicas of weights[1-2]")
    assert advice(job_of("ddp", 2).checked()).startswith("Leave the host out")


def test_ranks_without_equal_results_have_nothing_to_audit() -> None:
    alone = job_of("1f1b", 2).checked()
    assert not compared_ranks(replicas_of(alone), results_of(alone))
