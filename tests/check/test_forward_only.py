"""The forward half of every program is a program of its own, proved like any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.check import Checked, check, check_forward, forward_only
from shardlab.models import GPT
from shardlab.program import Mesh, OpKind, Refused
from shardlab.strategies import Plan
from shardlab.train.cases import CASES, Case
from shardlab.train.job import Job

KINDS = {
    OpKind.LOAD_BATCH, OpKind.LOAD_WEIGHT, OpKind.FORWARD, OpKind.LOSS, OpKind.LOSS_STATS, OpKind.ATTEND, OpKind.ADD,
    OpKind.SLICE, OpKind.CONCATENATE, OpKind.CAST, OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER,
    OpKind.ALL_TO_ALL, OpKind.BROADCAST, OpKind.SEND, OpKind.RECV, OpKind.WAIT, OpKind.FREE,
}  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_forward_half_of_every_strategy_computes_every_loss_and_runs_where_all_of_it_does(case: Case) -> None:
    whole = case.job().checked()
    half = check_forward(forward_only(whole))
    assert {op.kind for tape in half.program.tapes for op in tape} <= KINDS
    assert set(whole.backends()) <= set(half.backends())
    assert len(half.frozen) == sum(map(bool, half.program.sizes.weights))


def half() -> Checked:
    return check_forward(
        forward_only(Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked())
    )


def test_a_half_whose_loss_is_missing_is_refused() -> None:
    program = half().program
    tapes = [[op for op in tape if rank == 0 or op.kind is not OpKind.LOSS] for rank, tape in enumerate(program.tapes)]
    with pytest.raises(Refused, match="nobody computes the loss of microbatch 1"):
        check_forward(replace(program, tapes=tapes))


def test_the_half_of_one_microbatch_computes_its_loss_and_no_other() -> None:
    """In a program that takes its microbatches one by one."""
    whole = Job(Plan(Mesh(dp_shard=2)), 2, 4, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked()
    program = forward_only(whole, 0b1)
    part = check_forward(program, 0b1)
    losses = [
        part.specs[rank][op.inputs[0]]
        for rank, tape in enumerate(program.tapes)
        for op in tape
        if op.kind is OpKind.LOSS
    ]
    assert [spec.microbatches for spec in losses] == [0b1]
    with pytest.raises(Refused, match="nobody computes the loss of microbatch 1"):
        check_forward(program, 0b11)


def test_training_is_no_forward_half_and_a_forward_half_is_no_training() -> None:
    whole = Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked()
    with pytest.raises(Refused):
        check_forward(whole.program)
    with pytest.raises(Refused, match="makes no gradient, but the program trains"):
        check(half().program)
