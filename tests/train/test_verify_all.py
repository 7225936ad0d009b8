"""`shardlab verify --all`: its table is complete, and a representative part of it is verified here."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.train.cases import ALONE, CASES, PIPELINES, SHARDINGS, Case
from shardlab.train.verify_all import Result, verify_cases
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]
CPU = torch.device("cpu")

SAMPLE = [case for case in CASES if case.column != ALONE and case.ranks <= 4][::5]
"""All shardings, all schedules, and 2 to 4 microbatches are among them (a test says so)."""

LARGE = [next(case for case in CASES if (case.row, case.column) == place) for place in [("zb-v", "hsdp")]]


def test_the_table_has_every_strategy_and_every_sharding_on_every_pipeline() -> None:
    places: defaultdict[tuple[str, str], set[int]] = defaultdict(set)
    for case in CASES:
        data_ranks = case.strategy.data_ranks if isinstance(case.strategy, Plan) else 1
        places[case.row, case.column].add(case.microbatches // data_ranks)
    assert {row for row, column in places if column == ALONE} == set(STRATEGIES)
    assert set(PIPELINES) == {"none", *SCHEDULES}
    for row in PIPELINES:
        for column in SHARDINGS:
            assert places[row, column] == {2, 3, 4}


def test_the_sample_has_something_of_everything() -> None:
    assert {case.row for case in SAMPLE} == set(PIPELINES)
    assert {case.column for case in SAMPLE} >= {"ddp", "zero-1", "zero-2", "fsdp"}
    assert {case.dropout > 0 for case in SAMPLE} == {True, False}
    plans = [case.strategy for case in SAMPLE if isinstance(case.strategy, Plan)]
    assert {plan.recompute for plan in plans} >= {"none", "full"}
    assert {plan.reshard_after for plan in plans} == {"layer", "stage"}


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("count", sorted({case.ranks for case in (*SAMPLE, *LARGE)}))
def test_a_representative_part_gives_the_numbers_of_one_device(ranks: World, count: int) -> None:
    cases = [case for case in (*SAMPLE, *LARGE) if case.ranks == count]
    results = ranks(count).call(verify_cases, CPU, cases, 2)[0]
    assert [str(result.case) for result in results if not result.ok] == []
    assert [result.case for result in results] == cases


@pytest.mark.xdist_group("ranks")
def test_a_case_that_cannot_run_is_a_result_too(ranks: World) -> None:
    good = Case("none", "ddp", "ddp", 2, 2, 2)
    results = ranks(2).call(verify_cases, CPU, [replace(good, microbatches=3), good], 1)[0]
    assert [result.ok for result in results] == [False, True]
    assert "3 microbatches do not divide among 2 ranks" in results[0].refused
    assert results[0].error == math.inf


def test_an_error_above_the_tolerance_is_not_ok() -> None:
    assert not Result(CASES[0], 2e-12).ok
    assert not Result(CASES[0], math.nan).ok
    assert Result(CASES[0], 1e-15).ok
