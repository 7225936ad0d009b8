"""The forward half of every program is a program of its own, proved like any other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from shardlab.check import Checked, check, check_forward, forward_only
from shardlab.models import GPT
from shardlab.program import OpKind, Refused
from shardlab.strategies import Plan
from shardlab.train.cases import ALONE, CASES, PIPELINES, SHARDINGS, Case
from shardlab.train.job import Job

KINDS = {
    OpKind.LOAD_BATCH, OpKind.LOAD_WEIGHT, OpKind.FORWARD, OpKind.LOSS, OpKind.LOSS_STATS, OpKind.ATTEND, OpKind.ADD,
    OpKind.SLICE, OpKind.CONCATENATE, OpKind.CAST, OpKind.ALL_GATHER, OpKind.ALL_REDUCE, OpKind.REDUCE_SCATTER,
    OpKind.ALL_TO_ALL, OpKind.BROADCAST, OpKind.SEND, OpKind.RECV, OpKind.WAIT, OpKind.FREE,
}  # fmt: skip


def by_turns() -> Iterator[Case]:
    """Every strategy, and every sharding on every pipeline: with two, three and four microbatches a rank by turns."""
    yield from (case for case in CASES if case.column == ALONE)
    pairs = [case for case in CASES if case.column != ALONE]
    for at, some in enumerate(zip(pairs[::3], pairs[1::3], pairs[2::3], strict=True)):
        yield some[(at + at // len(PIPELINES)) % 3]


def test_every_pair_is_there_and_each_of_both_meets_every_number_of_microbatches() -> None:
    once = list(by_turns())
    pairs = {(case.row, case.column) for case in CASES}
    assert {(case.row, case.column) for case in once} == pairs
    assert len(once) == len(pairs)
    met = {
        (name, case.microbatches // case.strategy.data_ranks)
        for case in once
        for name in (case.row, case.column)
        if isinstance(case.strategy, Plan)
    }
    assert met == set(product((*PIPELINES, *SHARDINGS), (2, 3, 4)))


@pytest.mark.parametrize("case", [*by_turns()], ids=str)
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


def test_training_is_no_forward_half_and_a_forward_half_is_no_training() -> None:
    whole = Job("fsdp", 2, 2, GPT(layers=2, hidden_size=16, heads=2, seq_len=8), 2).checked()
    with pytest.raises(Refused):
        check_forward(whole.program)
    with pytest.raises(Refused, match="makes no gradient, but the program trains"):
        check(half().program)
