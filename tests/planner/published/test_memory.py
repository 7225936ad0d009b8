"""Memory as published: within bands, and runs that ran out of it are told from those that did not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlab.planner.published.predict import measured_as
from shardlab.planner.published.reading import PublishedRun, read_run
from shardlab.planner.published.records import GIB
from shardlab.simulate.predict.estimate import peak_of
from shardlab.simulate.predict.forecast import enough
from shardlab.simulate.predict.memory import held_memory
from shardlab.simulate.timeline.memory import memory_in_bytes
from shardlab.simulate.timeline.prices import rank_of
from tests.planner.published.chronicles import ROWS as CHRONICLES
from tests.planner.published.test_reading import ROWS, changed


def held(run: PublishedRun) -> tuple[float, bool]:
    """What a run holds and whether it fits, told by enough microbatches and without asking how long they take."""
    each = sum(enough(run.plan, run.each))
    workload = replace(run.workload, microbatches=each * run.plan.data_ranks)
    traced = workload.traced
    memories = memory_in_bytes(traced, workload.kept_sizes)
    peaks = [peak_of(traced, row, memory, rank_of(traced.program, row)) for row, memory in enumerate(memories)]
    made = held_memory(run.workload, peaks)
    return measured_as(run.measured.memory, made), made.fits


@pytest.mark.parametrize("row", CHRONICLES, ids=[row["id"] for row in CHRONICLES])
def test_runs_that_ran_out_of_memory_are_told_from_those_that_did_not(row: dict[str, Any]) -> None:
    run = read_run(row)
    bytes, fits = held(run)
    assert fits is not run.measured.out_of_memory
    if run.measured.bytes:
        assert bytes == pytest.approx(run.measured.bytes, rel=0.13)


def titan(
    memory: float, *, compiled: bool = True, recompute: str = "full", **sections: dict[str, Any]
) -> dict[str, Any]:
    base = ROWS["titan-t1-8B-8gpu-eager"]
    row = base | {name: base[name] | fields for name, fields in sections.items()}
    framework = "torchtitan" if compiled else "fsdp2"
    return row | {"framework": framework, "recompute": recompute, "measured": {"peak_memory_GiB": memory}}


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


@pytest.mark.parametrize("name", TITAN)
def test_what_torchtitan_reserves_is_told_within_a_tenth(name: str) -> None:
    run = read_run(TITAN[name])
    bytes, fits = held(run)
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
def test_what_nemos_recipes_reserve_is_told_within_three_percent(gibibytes: float, row: dict[str, Any]) -> None:
    said = {"id": "a recipe", "source": "its README", "framework": "megatron-core", "precision": "fp8"}
    run = read_run(row | said | {"measured": {"peak_memory_GiB": gibibytes}})
    bytes, fits = held(run)
    assert fits
    assert bytes == pytest.approx(gibibytes * GIB, rel=0.03)
    assert "recompute: none" in run.assumed


def test_reserved_memory_never_exceeds_a_device_on_which_a_run_fits() -> None:
    run = read_run(changed("titan-t1-8B-8gpu-eager", "batch", global_sequences=16))
    for reserved in (1.0, 1.1, 1.3):
        recipe = run.workload.recipe
        recipe = replace(recipe, memory=replace(recipe.memory, reserved=reserved))
        bytes, fits = held(replace(run, workload=replace(run.workload, recipe=recipe)))
        assert not fits or bytes <= run.workload.cluster.device.memory
