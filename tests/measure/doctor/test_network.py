"""The smoke test finds ranks that are off, out of sync, or get wrong numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from shardlab.measure.doctor.network import MeasuredLink, SmokeResult, SmokeRun, _unequal_ranks, smoke_rank
from shardlab.measure.fits import CollectivePoint
from shardlab.train.verification.cases import Verdict
from tests.support.ranks import Ranks

pytestmark = pytest.mark.starts_ranks

GOOD = SmokeResult(
    [SmokeRun("ddp", Verdict(0.0, 1e-15, 0, 1e-15, 1), [])],
    CollectivePoint("all_reduce", 2, 1024, 0.1, 5, 0),
    [MeasuredLink(0, 1, 1e-4, 1e9, 0)],
)


def test_nothing_is_wrong_with_good_ranks() -> None:
    assert GOOD.failures() == []


BAD = [
    ({"trained": [SmokeRun("ddp", Verdict(0.0, 1e-15, 0, 1e-3, 1), [])]}, "ddp is 1.0e-03 from one device"),
    ({"trained": [replace(GOOD.trained[0], unequal=[1])]}, "ddp: rank 1 has other weights"),
    ({"all_reduce": CollectivePoint("all_reduce", 2, 1024, 0.1, 5, 7)}, "an all-reduce gave 7 wrong numbers"),
    ({"links": [MeasuredLink(0, 1, 1e-4, 1e9, 3)]}, "3 numbers arrived wrong between ranks 0 and 1"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_faults_of_the_host_are_reported(change: dict[str, Any], message: str) -> None:
    (sentence,) = replace(GOOD, **change).failures()
    assert message in sentence


def _rank_with_a_flipped_weight(rank: int) -> list[int]:
    weights = torch.zeros(4)
    if dist.get_rank() == 1:
        weights[2] = 1e-30
    slices = {(0, "all"): weights, (1, f"slice {rank}"): torch.ones(2) * rank}
    return _unequal_ranks(cast(Any, SimpleNamespace(kept=slices)))


def test_a_single_flipped_bit_is_found_and_slices_of_ones_own_are_not_compared(ranks: Callable[[int], Ranks]) -> None:
    assert ranks(2).call(_rank_with_a_flipped_weight) == [[1], [1]]


def _trained(rank: int) -> SmokeResult | None:
    return smoke_rank(rank, torch.device("cpu"), ("ddp",))


def test_ranks_here_pass(ranks: Callable[[int], Ranks]) -> None:
    result, other = ranks(2).call(_trained)
    assert result is not None
    assert other is None
    assert result.failures() == []
    assert result.all_reduce is not None
    assert result.all_reduce.seconds > 0
