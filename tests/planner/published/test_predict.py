"""Predictions of published runs: within generous bands."""

from __future__ import annotations

import multiprocessing
import os
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.planner.published.predict import (
    ErrorSummary,
    Outcome,
    Prediction,
    errors_by_source,
    measured_as,
    on_every_core,
    predict,
    predict_outcome,
    predict_outcomes,
    worst_errors,
    wrong_fits,
)
from shardlab.planner.published.reading import PublishedRun, read_run
from shardlab.planner.published.records import GIB, Measurement, read_rows
from shardlab.simulate.predict.estimate import peak_of
from shardlab.simulate.predict.forecast import microbatches_to_replay
from shardlab.simulate.predict.memory import device_memory
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.simulate.timeline.prices import rank_of
from tests.planner.published.chronicles import ROWS as CHRONICLES
from tests.planner.published.test_reading import ROWS, changed
from tests.support.thorough import sampled

STATE = "zero-7.5B-Nd64-stage2"
SILENT = "llama3-405B-t4-8192gpu-s8192"


@pytest.mark.parametrize("name", [name for name in ROWS if name not in (STATE, SILENT)])
def test_a_published_run_is_predicted_within_a_fifth(name: str) -> None:
    outcome = predict_outcome(ROWS[name])
    assert outcome.prediction is not None
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.2
    assert abs(outcome.error("bytes") or 0.0) < 0.2


def test_a_run_that_says_too_little_is_listed_with_its_reason() -> None:
    outcome = predict_outcome(ROWS[SILENT])
    assert outcome.prediction is None
    assert "neither the seconds of a step nor memory" in outcome.reason


def test_many_microbatches_are_predicted_from_fewer() -> None:
    row = ROWS["zb-t12-6.2B-p8-m8-1f1b"]
    run = read_run(row | {"batch": row["batch"] | {"global_sequences": 192}})
    assert predict(run).seconds == pytest.approx(run.workload.estimate().step, rel=1e-3)


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
    outcome = predict_outcome(row)
    assert outcome.measured.of_block
    error = outcome.error("seconds")
    assert error is not None
    assert abs(error) < 0.1


# The arithmetic of the report.


ERRORS = st.lists(st.floats(-1, 5), min_size=1)


def outcome(name: str, source: str, seconds: float, *, fits: bool = True, out: bool = False) -> Outcome:
    return Outcome(name, source, Measurement(1.0, None, "allocated", out), Prediction(seconds, 1.0, fits))


@given(ERRORS)
def test_errors_lie_in_order(values: list[float]) -> None:
    errors = ErrorSummary.of(values)
    assert errors.count == len(values)
    assert abs(errors.bias) <= errors.mean + 1e-12
    assert errors.mean <= errors.worst + 1e-12
    assert errors.median <= errors.worst
    assert errors.worst in map(abs, values)


def test_of_nothing_there_are_no_errors() -> None:
    assert errors_by_source([], "seconds") == {}


def test_sources_are_grouped_and_signs_kept() -> None:
    runs = [outcome("a", "vTrain", 1.1), outcome("b", "vTrain", 0.7), outcome("c", "elsewhere", 1.0)]
    summaries = errors_by_source(runs, "seconds")
    assert list(summaries) == ["vTrain", "elsewhere", "all"]
    assert summaries["all"].count == 3
    assert (round(summaries["vTrain"].mean, 9), round(summaries["vTrain"].bias, 9)) == (0.2, -0.1)
    assert [run.id for _, run in worst_errors(runs, "seconds", 2)] == ["b", "a"]


def test_a_run_whose_memory_was_mispredicted_is_named() -> None:
    runs = [
        outcome("ran", "", 1.0),
        outcome("ended", "", 1.0, fits=False, out=True),
        outcome("thought too large", "", 1.0, fits=False),
        outcome("thought to fit", "", 1.0, out=True),
        Outcome("not asked", "", Measurement(1.0, None, "allocated"), None, "says nothing"),
    ]
    assert [run.id for run in wrong_fits(runs)] == ["thought too large", "thought to fit"]


# Memory as published: within bands, and runs that ran out of it are told from those that did not.


def predict_memory(run: PublishedRun) -> tuple[float, bool]:
    """What a run holds and whether it fits, told by enough microbatches and without asking how long they take."""
    microbatches = sum(microbatches_to_replay(run.plan, run.rank_microbatches))
    workload = replace(run.workload, microbatches=microbatches * run.plan.data_ranks)
    traced = workload.traced
    memories = memory_in_bytes(traced, workload.kept_sizes)
    peaks = [peak_of(traced, row, memory, rank_of(traced.program, row)) for row, memory in enumerate(memories)]
    predicted = device_memory(run.workload, peaks)
    return measured_as(run.measured.memory, predicted), predicted.fits


def is_short(row: dict[str, Any]) -> bool:
    """Whether the memory of a run is forecast in less than a second. Runs of either outcome are."""
    return (
        "pp 12" not in row["id"] and "tp 2" not in row["id"] and "dp 16" not in row["id"] and "72 layers" in row["id"]
    )


@pytest.mark.parametrize("row", sampled(CHRONICLES, is_short), ids=[row["id"] for row in CHRONICLES])
def test_runs_that_ran_out_of_memory_are_distinguished_from_those_that_did_not(row: dict[str, Any]) -> None:
    run = read_run(row)
    bytes, fits = predict_memory(run)
    assert fits is not run.measured.out_of_memory
    if run.measured.bytes:
        assert bytes == pytest.approx(run.measured.bytes, rel=0.13)


def titan(
    memory: float, *, compiled: bool = True, recompute: str = "full", **sections: dict[str, Any]
) -> dict[str, Any]:
    base = ROWS["titan-t1-8B-8gpu-eager"]
    row = base | {name: base[name] | fields for name, fields in sections.items()}
    recipe = {"framework": "torchtitan" if compiled else "fsdp2", "switches": SWITCHES_2024}
    return row | recipe | {"recompute": recompute, "measured": {"peak_memory_GiB": memory}}


SWITCHES_2024 = {"attention": "flash2", "loss": "float32", "logits_gathered": "off"}


PER_OP = "selective-per-op"
TWO = {"global_sequences": 256, "micro_batch": 2}
LLAMA_70B = {"layers": 80, "hidden": 8192, "heads": 64, "ffn_hidden": 28672}
LLAMA_405B = {"layers": 126, "hidden": 16384, "heads": 128, "ffn_hidden": 53248}
AXES_405B = {"tp": 8, "pp": 8, "dp": 8, "schedule": "1f1b", "sequence_parallel": True}

TITAN = {
    "table 1, compiled": titan(77.0, recompute=PER_OP),
    "table 2, 32768 tokens": titan(83.9, model={"seq_len": 32768}, batch={"global_sequences": 8, "micro_batch": 1}),
    "table 2, 65536 tokens": titan(
        84.2,
        model={"seq_len": 65536},
        parallelism={"dp": 4, "cp": 2},
        batch={"global_sequences": 4, "micro_batch": 1},
    ),
    "table 3, eager": titan(
        67.0, compiled=False, recompute=PER_OP, hardware={"gpus": 128}, parallelism={"dp": 128}, batch=TWO
    ),
    "table 3, compiled": titan(62.0, recompute=PER_OP, hardware={"gpus": 128}, parallelism={"dp": 128}, batch=TWO),
    "table 4": titan(
        71.9,
        model=LLAMA_70B,
        hardware={"gpus": 256},
        parallelism={"tp": 8, "dp": 32, "sequence_parallel": True},
        batch={"global_sequences": 512, "micro_batch": 16},
    ),
    "table 5, 1F1B": titan(
        82.5,
        model=LLAMA_405B,
        hardware={"gpus": 512},
        parallelism=AXES_405B,
        batch={"global_sequences": 256, "micro_batch": 4},
    ),
    "table 5, interleaved": titan(
        72.7,
        model=LLAMA_405B,
        hardware={"gpus": 512},
        parallelism=AXES_405B | {"schedule": "interleaved-1f1b", "interleave_v": 2},
        batch={"global_sequences": 256, "micro_batch": 4},
    ),
}
"""pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: GiB that the allocator had reserved."""


@pytest.mark.parametrize("name", sampled(TITAN, lambda name: name != "table 5, interleaved"))
def test_what_torchtitan_reserves_is_predicted_within_a_tenth(name: str) -> None:
    run = read_run(TITAN[name])
    bytes, fits = predict_memory(run)
    assert fits
    assert bytes == pytest.approx(run.measured.bytes, rel=0.1)


@pytest.mark.parametrize(
    ("gibibytes", "row"),
    [
        # NVIDIA/dgxc-benchmarking v25.04.02, llama3.1/README.md: peak_memory_usage 70833405952 of 8B on 8 GPUs
        (
            70833405952 / GIB,
            {
                "model": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn_hidden": 14336}
                | {"ffn_type": "swiglu", "vocab": 128256, "seq_len": 8192, "tied_embeddings": False},
                "hardware": {"device": "h100", "gpus": 8},
                "parallelism": {"tp": 1, "pp": 1, "dp": 4, "cp": 2},
                "batch": {"global_sequences": 128, "micro_batch": 1},
            },
        ),
        # nemotron/README.md of the same: peak_memory_usage 72972500992 of 15B on 64 GPUs
        (
            72972500992 / GIB,
            {
                "model": {"layers": 32, "hidden": 6144, "heads": 48, "kv_heads": 8, "ffn_hidden": 24576}
                | {"ffn_type": "squared_relu", "vocab": 256000, "seq_len": 4096, "tied_embeddings": False},
                "hardware": {"device": "h100", "gpus": 64},
                "parallelism": {"tp": 2, "pp": 1, "dp": 32, "sequence_parallel": True},
                "batch": {"global_sequences": 256, "micro_batch": 2},
            },
        ),
    ],
)
def test_what_nemos_recipes_reserve_is_predicted_within_three_percent(gibibytes: float, row: dict[str, Any]) -> None:
    settings = {"id": "a recipe", "source": "its README", "framework": "megatron-core-tuned", "precision": "fp8"}
    run = read_run(row | settings | {"measured": {"peak_memory_GiB": gibibytes}})
    bytes, fits = predict_memory(run)
    assert fits
    assert bytes == pytest.approx(gibibytes * GIB, rel=0.03)
    assert "recompute: none" in run.assumed


def test_reserved_memory_never_exceeds_a_device_on_which_a_run_fits() -> None:
    run = read_run(changed("titan-t1-8B-8gpu-eager", "batch", global_sequences=16))
    for reserved in (1.0, 1.1, 1.3):
        recipe = run.workload.recipe
        recipe = replace(recipe, memory=replace(recipe.memory, reserved=reserved))
        bytes, fits = predict_memory(replace(run, workload=replace(run.workload, recipe=recipe)))
        assert not fits or bytes <= run.workload.cluster.device.memory


RUNS = Path(__file__).parent / "published_runs.json"


def test_processes_say_what_one_would_say_in_the_order_of_the_rows() -> None:
    rows = [row for row in read_rows(RUNS) if row["parallelism"]["pp"] == 1][::4]
    assert len(rows) > 2
    assert list(predict_outcomes(rows)) == [predict_outcome(row) for row in rows]
    assert list(predict_outcomes(rows[:1])) == [predict_outcome(rows[0])]


def ignores_ctrl_c(row: dict[str, Any], recipe: object) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_ctrl_c_reaches_only_the_process_that_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    others = set(multiprocessing.active_children())
    rows: list[dict[str, Any]] = [{}] * 3
    results = on_every_core(ignores_ctrl_c, rows, None)
    assert next(results)
    results.close()
    assert set(multiprocessing.active_children()) <= others
    assert not ignores_ctrl_c({}, None)
