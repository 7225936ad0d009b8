"""Predictions of published runs: within generous bands, and with the steady part of a schedule told by less of it."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest

from shardlab.predict.estimate import Estimate, estimate
from shardlab.predict.folding import fold
from shardlab.program import Kind, Mesh, Op, OpKind, Sizes, Spec
from shardlab.published import predict as predicting
from shardlab.published.model_state import model_state_bytes
from shardlab.published.outcomes import outcome_of
from shardlab.published.predict import enough, extended, predict
from shardlab.published.reading import PublishedRun, read_run
from shardlab.strategies.plan import Plan
from tests.published.test_reading import ROWS
from tests.timeline.fakes import FakePrices

STATE = "zero-7.5B-Nd64-stage2"
SILENT = "llama3-405B-t4-8192gpu-s8192"


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (STATE, SILENT)])
def test_a_published_run_is_predicted_within_a_fifth(name: str) -> None:
    outcome = outcome_of(ROWS[name])
    assert outcome.prediction is not None
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.2
    assert abs(outcome.error("bytes") or 0.0) < 0.2


def test_a_run_that_says_too_little_is_listed_with_its_reason() -> None:
    outcome = outcome_of(ROWS[SILENT])
    assert outcome.prediction is None
    assert "neither the seconds of a step nor memory" in outcome.reason


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_the_memory_of_zero_is_the_papers(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, arXiv 1910.02054, figure 1: 7.5 B parameters on 64 GPUs."""
    assert model_state_bytes(7.5e9, 64, stage) / 1e9 == pytest.approx(gigabytes, rel=0.02)


def test_many_microbatches_are_told_by_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    row = ROWS["zb-t12-6.2B-p8-m8-1f1b"]
    run = read_run(row | {"batch": row["batch"] | {"global_sequences": 192}})
    replayed: list[int] = []
    replay = predicting._replay  # pyright: ignore[reportPrivateUsage]

    def noting(run: PublishedRun, each: int) -> Estimate:
        replayed.append(each)
        return replay(run, each)

    monkeypatch.setattr(predicting, "_replay", noting)
    assert predict(run).seconds == pytest.approx(replay(run, 64).step, rel=1e-3)
    assert sum(replayed) < 64


SHARES = {OpKind.BACKWARD: 2.0, OpKind.BACKWARD_WEIGHT: 0.9, OpKind.LOSS: 0.1, OpKind.UPDATE: 0.1}
"""What an op takes, if a forward pass takes 1."""


@dataclass(frozen=True)
class StagePrices(FakePrices):
    """Stages of one layer, the first and the last with times of their own."""

    last: int = 0
    ends: tuple[float, float] = (1.0, 1.0)
    message: float = 0.03
    adds_in_backward: bool = True

    def compute_time(self, op: Op, specs: Mapping[int, Spec], sizes: Sizes) -> float:
        stage = {0: self.ends[0], self.last: self.ends[1]}.get(op.layer, 1.0)
        return stage * SHARES.get(op.kind, 1.0) if op.inputs else 0.0

    def message_times(self, value: Kind, bytes: float, source: int, target: int) -> tuple[float, float]:
        return self.message, self.message


@pytest.mark.parametrize("blocks", [0.0, 1.0])
@pytest.mark.parametrize("ends", [(1.0, 1.0), (1.0, 1.5), (0.7, 0.7)])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 3), ("zb-h1", 1), ("zb-v", 2)])
def test_a_few_microbatches_tell_the_time_of_many(
    schedule: str, chunks: int, ends: tuple[float, float], blocks: float
) -> None:
    plan, each = Plan(Mesh(pp=4), schedule, stages_per_rank=chunks), 44
    layers = 4 * chunks
    prices = StagePrices(last=layers - 1, ends=ends, blocking_p2p=blocks)

    def step(microbatches: int) -> float:
        return estimate(fold(plan, Sizes.puzzle(layers), microbatches), prices).step

    few, more = enough(plan, each)
    assert 2 * few + more < each
    assert extended(step(few), step(few + more), (each - few) / more) == pytest.approx(step(each), rel=1e-3)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_all_of_a_few_microbatches_are_replayed(schedule: str) -> None:
    assert enough(Plan(Mesh(pp=4), schedule), 12) == (12, 0)


def test_a_device_too_small_does_not_fit() -> None:
    row = ROWS["mpt-h100_80gb-7b-s32768-8gpu-mbs2-ga2"]
    crowded = row | {"recompute": "none"}
    assert predict(read_run(row)).fits
    assert not predict(read_run(crowded)).fits


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "milliseconds"),
    [
        (False, "none", 19.6),
        (True, "none", 19.0),
        (False, "full", 27.2),
        (False, "selective", 20.9),
        (True, "selective", 20.3),
    ],
)
def test_a_block_takes_what_table_4_of_korthikanti_measured(
    sequence_parallel: bool, recompute: str, milliseconds: float
) -> None:
    """Korthikanti et al. 2022, arXiv 2205.05198, table 4: a block of the 22B model, forward and backward."""
    row: dict[str, Any] = deepcopy(ROWS["korthikanti-t5-22B-full"]) | {"recompute": recompute}
    row["parallelism"]["sequence_parallel"] = sequence_parallel
    row["measured"] = {"layer_forward_ms": milliseconds / 3, "layer_backward_ms": milliseconds * 2 / 3}
    outcome = outcome_of(row)
    assert outcome.measured.of_block
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.1
