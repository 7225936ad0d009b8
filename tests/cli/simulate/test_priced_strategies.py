"""`shardlab simulate` with a model and a cluster: seconds and bytes, and one sentence for each mistake."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardlab.cli import main
from shardlab.cli.console import Report
from shardlab.cli.simulate.priced import add_step, price
from shardlab.cli.step_request import StepRequest
from shardlab.common.text import seconds_text

Captured = pytest.CaptureFixture[str]

GPT2 = ("--model", "gpt2", "--cluster", "h100x8")

TP = ("--pp", "2", "--dp-shard", "2", "--tp", "2", "--shard-optimizer", "dp_shard")


def json_of(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert main(["simulate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def refused(capsys: Captured, *arguments: str) -> str:
    """The one line that a mistake is told in."""
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


@pytest.mark.parametrize("arguments", [("fsdp",), ("ddp",), ("zero-1",), ("1f1b",), ("--dp-shard", "4"), TP])
def test_json_has_the_figures_of_the_step(arguments: tuple[str, ...], capsys: Captured) -> None:
    facts = json_of(capsys, *arguments, *GPT2, "--layers", "8")
    step, ranks = facts["step_seconds"], facts["ranks"]
    assert isinstance(step, float)
    assert 0 < step < 10
    assert ranks == (4 if arguments == ("--dp-shard", "4") else 8)
    assert facts["tokens"] == facts["microbatches"] * facts["micro_batch_size"] * 1024
    assert facts["tokens_per_second"] == pytest.approx(facts["tokens"] / step)
    assert facts["mfu"] == pytest.approx(facts["model_flops"] / (step * ranks * 989.4e12))
    shares = (facts["compute_share"], facts["exposed_share"], facts["idle_share"])
    assert sum(shares) == pytest.approx(1)
    peaks = facts["peak_memory_by_rank"]
    assert facts["peak_memory"] == max(peak["bytes"] for peak in peaks) <= facts["device_memory"]
    assert all(sum(peak["by_category"].values()) == peak["bytes"] for peak in peaks)
    assert (facts["precision"], facts["model"], facts["cluster"]) == ("bf16", "gpt2", "h100x8")


def test_identical_ranks_are_simulated_once(capsys: Captured) -> None:
    facts = json_of(capsys, *TP, *GPT2, "--layers", "4")
    assert (facts["ranks"], facts["ranks_simulated"]) == (8, 2)


def test_a_small_plan_is_checked_on_all_its_ranks_and_a_large_one_says_that_it_is_not(capsys: Captured) -> None:
    assert json_of(capsys, *TP, *GPT2)["checked"]
    assert json_of(capsys, "fsdp", *GPT2)["checked"], "a program of its own always is"
    large = ("--pp", "8", "--dp-shard", "8", "--microbatches", "256", "--model", "gpt2", "--cluster", "h100x64")
    assert not json_of(capsys, *large)["checked"]


def test_a_program_of_whole_blocks_says_that_a_tied_head_is_priced_apart(capsys: Captured) -> None:
    (note,) = json_of(capsys, "fsdp", *GPT2)["notes"]
    assert "38,597,376 parameters of its own" in note
    assert json_of(capsys, "zero-3", *GPT2)["notes"] == []


def test_a_plan_that_the_recipe_s_framework_does_not_run_is_predicted_only_as_if(capsys: Captured) -> None:
    arguments = ("--pp", "8", "--microbatches", "4", *GPT2, "--global-batch", "4", "--recipe")
    limit = (
        "nanotron's 1f1b needs at least pp - 1 microbatches; with pp 8 give at least 7 to each data-parallel rank, "
        "not 4"
    )
    assert main(["simulate", *arguments, "nanotron"]) == 2
    assert f"{limit}, or --as-if to predict it as if nanotron could run it" in capsys.readouterr().err
    (note,) = json_of(capsys, *arguments, "nanotron", "--as-if")["notes"]
    assert note == f"predicted as if nanotron could run it: {limit}"
    assert json_of(capsys, *arguments, "shardlab")["notes"] == []


def test_more_rows_take_longer_and_more_memory(capsys: Captured) -> None:
    one, four = (json_of(capsys, "zero-3", *GPT2, "--micro-batch-size", rows) for rows in ("1", "4"))
    assert four["step_seconds"] > one["step_seconds"]
    assert four["peak_memory"] > one["peak_memory"]


def test_a_plan_in_a_file_is_priced(tmp_path: Path, capsys: Captured) -> None:
    path = tmp_path / "plan.toml"
    path.write_text('schedule = "1f1b"\nshard_optimizer = ["dp_shard"]\n[mesh]\npp = 2\ndp_shard = 2\n')
    facts = json_of(capsys, "--plan", str(path), *GPT2)
    assert facts["mesh"] == {"pp": 2, "dp_shard": 2}


def test_a_trace_and_a_picture_are_written(tmp_path: Path, capsys: Captured) -> None:
    files = ("--trace", str(tmp_path / "t.json"), "--svg", str(tmp_path / "t.svg"))
    assert main(["simulate", *TP, *GPT2, "--layers", "2", *files]) == 0
    assert "written to" in capsys.readouterr().out
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert "time (seconds)" in (tmp_path / "t.svg").read_text()


def test_a_trace_in_unit_costs_is_written_as_well(tmp_path: Path) -> None:
    assert main(["simulate", "fsdp", "--trace", str(tmp_path / "t.json")]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]


MISTAKES = [
    (("fsdp", "--model", "gpt2"), "give --cluster, such as h100x16, too"),
    (("fsdq", "--model", "gpt2"), "did you mean fsdp?"),
    (("fsdp", "--cluster", "h100x8"), "give --model, such as gpt2-xl, too"),
    (("fsdp", "--micro-batch-size", "2"), "--micro-batch-size needs a model and a cluster"),
    (("fsdp", "--precision", "bf16"), "--precision needs a model and a cluster"),
    (("fsdp", *GPT2, "--costs", "forward=1"), "leave out one of them"),
    (("fsdp", "--model", "gpt2-xxl", "--cluster", "h100x8"), "there is no model 'gpt2-xxl'; did you mean gpt2"),
    (("fsdp", "--model", "gpt2", "--cluster", "h10x8"), "there is no device 'h10'; did you mean h100"),
    (("fsdp", *GPT2, "--precision", "bf61"), "there is no precision 'bf61'; did you mean bf16?"),
    (("zero-1", *GPT2, "--precision", "bf16,fp16"), "precision bf16,fp16 names 2 precisions"),
    (("fsdp", *GPT2, "--ranks", "16"), "16 ranks do not fit on 8 devices"),
    (("--pp", "4", "--dp-shard", "4", *GPT2), "16 ranks do not fit on 8 devices"),
    (("fsdp", "--model", "gpt2", "--cluster", "v100x8", "--precision", "bf16"), "v100 does not compute in bfloat16"),
    (("ddp", "--model", "llama3-8b", "--cluster", "h100x8"), "--shard-optimizer dp_shard, would fit"),
]


@pytest.mark.parametrize(("arguments", "said"), MISTAKES)
def test_a_mistake_is_reported_in_one_sentence(arguments: tuple[str, ...], said: str, capsys: Captured) -> None:
    assert said in refused(capsys, *arguments)


@pytest.mark.parametrize("width", [80, 160])
def test_the_report_names_every_figure(width: int) -> None:
    result = price(StepRequest("gpt2", "h100x8", "zero-3", model_fields={"layers": 4}))
    stream = io.StringIO()
    report = Report()
    add_step(report, result)
    report.print(Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert text.replace("±", "").isascii()
    for label in ("step time", "tokens/s", "MFU", "compute", "exposed", "idle", "peak memory", "ops", "rank"):
        assert f"\n{label}" in text or f"\n  {label}" in text
    rows = [line for line in text.splitlines() if line.endswith("MiB") and line.strip()[0].isdigit()]
    assert len(rows) == 1


@pytest.mark.parametrize(
    ("layout", "dropout", "useless"),
    [("--dp-shard 8", 0.0, True), ("--dp-shard 8", 0.1, False), ("--cp 2 --dp-shard 4", 0.1, True)],
)
def test_selective_recomputation_that_saves_nothing_says_so(
    layout: str, dropout: float, useless: bool, tmp_path: Path, capsys: Captured
) -> None:
    """Fused attention keeps no scores, and neither does context parallelism, whose attention is a step of its own."""
    model = tmp_path / "model.toml"
    model.write_text(f'model = "gpt2"\nlayers = 4\ndropout = {dropout}\n')
    arguments = [*layout.split(), "--recompute", "selective", "--model", str(model), "--cluster", "h100x8"]
    notes = json_of(capsys, *arguments)["notes"]
    assert any("selective saves no memory" in note for note in notes) == useless


def test_seconds_are_printed_in_a_fitting_unit() -> None:
    assert [seconds_text(s) for s in (3.456, 0.1258, 9.31e-5, 4000)] == ["3.46 s", "125.8 ms", "93.1 us", "4,000 s"]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("zero-3", *GPT2), "head"),
        (("--dp-shard", "8", "--recompute", "full", "--micro-batch-size", "8", *GPT2), "head"),
        (
            ("--cp", "8", "--microbatches", "1", "--model", "gpt2-xl", "--cluster", "h100x8"),
            "norm of block 0, attention",
        ),
        (("fsdp", *GPT2, "--layers", "2"), "block 1"),
    ],
)
def test_what_causes_the_peak_is_reported_in_the_models_terms(
    arguments: tuple[str, ...], part: str, capsys: Captured
) -> None:
    peaks = json_of(capsys, *arguments)["peak_memory_by_rank"]
    assert peaks[0]["cause"]["part"] == part
    assert all("of layer" not in peak["cause"]["text"] for peak in peaks)
