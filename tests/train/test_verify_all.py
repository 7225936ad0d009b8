"""`shardlab verify --all`: its table is complete, and what cannot run is in it as well."""

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
from shardlab.train.verify_all import CaseResult, verify_cases
from tests.support.ranks import Ranks

World = Callable[[int], Ranks]
CPU = torch.device("cpu")


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


@pytest.mark.xdist_group("ranks")
def test_a_case_that_cannot_run_is_a_result_too(ranks: World) -> None:
    good = Case("none", "ddp", "ddp", 2, 2, 2)
    results = ranks(2).call(verify_cases, CPU, [replace(good, microbatches=3), good], 1)[0]
    assert [result.ok for result in results] == [False, True]
    assert "3 microbatches do not divide among 2 ranks" in results[0].refused
    assert results[0].error == math.inf


def test_an_error_above_the_tolerance_is_not_ok() -> None:
    assert not CaseResult(CASES[0], 2e-12).ok
    assert not CaseResult(CASES[0], math.nan).ok
    assert CaseResult(CASES[0], 1e-15).ok
