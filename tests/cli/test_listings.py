"""`shardlab strategies` and the command line around the commands."""

from __future__ import annotations

import io
import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from shardlab.cli import COMMANDS, main
from shardlab.cli.listings import print_strategies, sends_text
from shardlab.simulate.hardware import DEVICES, LINKS
from shardlab.simulate.predict.recipe import recipes
from shardlab.strategies import STRATEGIES
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.pytorch_csv import CsvFormat
from tests.planner.published.test_reading import ROWS
from tests.strategies.csv_files import csv_of
from tests.support.thorough import sampled

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("width", sampled([80, 160], {80}.__contains__))
def test_the_table_says_of_every_strategy_what_it_splits_sends_and_keeps_and_fits_the_terminal(width: int) -> None:
    stream = io.StringIO()
    print_strategies(Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    for entry in STRATEGIES.values():
        assert entry.name in text
        assert entry.memory in text
        assert sends_text(entry) in " ".join(text.split()) or width == 160
    assert "sends 3 (n - 1) / n W: 2.25 W in 24 collectives" in text or width == 160
    assert "fsdp is the program to read" in " ".join(text.split()), "how it differs from zero-3"


def test_json_lists_the_same_alone(capsys: Captured) -> None:
    assert main(["strategies", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(STRATEGIES)
    assert all(set(row) == {"name", "splits", "sends", "keeps", "source"} for row in rows.values())
    assert all(row["keeps"] and row["source"] and row["splits"] for row in rows.values())
    assert rows["ddp"]["sends"]["weights"] == 1.5
    assert rows["ddp"]["sends"]["formula"] == "2 * (n - 1) / n * W"
    assert rows["gpipe"]["sends"]["messages"] == rows["gpipe"]["sends"]["activations"] == 16
    assert rows["single"]["sends"]["bytes"] == 0


@pytest.mark.parametrize(
    "command",
    [
        *(name for name in COMMANDS if name not in ("bench", "data", "checkpoint", "learn")),
        *("bench collectives", "bench compute", "data prepare", "data shakespeare", "data show"),
        *("learn list", "learn check-all", "learn run", "checkpoint ls", "checkpoint verify", "checkpoint convert"),
    ],
)
def test_every_command_explains_itself(command: str, capsys: Captured) -> None:
    """Those that start another command print no table of their own."""
    assert main([*command.split(), "--help"]) == 0
    captured = capsys.readouterr()
    assert f"usage: shardlab {command}" in captured.out
    assert "--json" in captured.out or command in ("launch", "submit")


def test_the_version_is_the_packages(capsys: Captured) -> None:
    assert main(["--version"]) == 0
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert capsys.readouterr().out == f"shardlab {project['version']}\n"


def test_without_a_command_the_commands_are_named(capsys: Captured) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert all(command in err for command in COMMANDS)


# `shardlab recipes`, and `--recipe` on the commands that predict.


STEP = ["simulate", "--pp", "2", "--dp-shard", "4", "--model", "gpt2", "--cluster", "h100x8", "--microbatches", "16"]


def output(captured: Captured, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(captured.readouterr().out)


def test_every_recipe_is_listed_with_its_source(capsys: Captured) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line[:1].isalpha()} >= recipes().keys()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines), "addresses stay whole"
    assert [row["name"] for row in output(capsys, "recipes")] == list(recipes())


def test_of_one_recipe_every_figure_is_printed_with_its_source(capsys: Captured) -> None:
    assert main(["recipes", "megatron-core-tuned"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "; fitted to: the allocator's peak of two recipes" in said
    assert "tp_overlap: off, on (default)" in said
    assert "share = tp 0.7, dp_shard 0.9, cp 0.7 assumed: round figures" in said
    assert "layer_norm 1 and 1.333" in said
    recipe = output(capsys, "recipes", "megatron-core-tuned")
    assert recipe["kernels"]["attention"] == "cudnn"
    figure = recipe["figures"]["memory.kept_when_full"]
    assert (figure["value"], figure["assumed"]) == (0.5, True)


@pytest.mark.parametrize("command", [["recipes", "megatron"], [*STEP, "--recipe", "megatron"]])
def test_an_unknown_recipe_is_a_sentence_with_the_nearest(command: list[str], capsys: Captured) -> None:
    assert main(command) == 2
    assert "there is no recipe 'megatron'; did you mean megatron-" in capsys.readouterr().err


# `shardlab clusters`.


def test_every_device_and_link_is_listed_with_its_source(capsys: Captured) -> None:
    assert main(["clusters"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines), "addresses stay whole"
    assert {line.split()[0] for line in lines if line[:1].strip()} >= {*DEVICES, *LINKS}
    tables = output(capsys, "clusters")
    assert (tables["devices"].keys(), tables["links"].keys()) == (DEVICES.keys(), LINKS.keys())
    assert tables["nodes"].keys() == DEVICES.keys()
    rows = [row for table in tables.values() for row in table.values()]
    assert all(row["source"] for row in rows)
    assert tables["devices"]["mi355x"]["runs"] == []


@pytest.mark.parametrize("name", [*DEVICES, *LINKS])
def test_of_one_device_or_link_every_figure_has_a_source(name: str, capsys: Captured) -> None:
    shown = output(capsys, "clusters", name)
    assert shown["source"]
    figures = shown["efficiency"]["figures"] if name in DEVICES else shown["figures"]
    assert all(figure["source"] or figure["fitted_to"] for figure in figures.values())


def test_a_cluster_says_what_of_its_network_is_assumed(capsys: Captured, tmp_path: Path) -> None:
    assert output(capsys, "clusters", "a100x16")["assumed"] == ["intra_node", "inter_node", "nics"]
    file = tmp_path / "ours.toml"
    file.write_text('device = "a100"\nnodes = 2\nnics = 2\n')
    assert output(capsys, "clusters", str(file))["assumed"] == ["intra_node", "inter_node"]
    assert main(["clusters", str(file)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "2 nodes of 8 a100-80gb 2 NICs a node; assumed, as in a usual node: intra_node, inter_node" in said


@pytest.mark.parametrize(("name", "nearest"), [("h10", "h100"), ("nvlink9", "nvlink"), ("h10x16", "h100")])
def test_an_unknown_device_or_link_is_a_sentence_with_the_nearest(name: str, nearest: str, capsys: Captured) -> None:
    assert main(["clusters", name]) == 2
    assert nearest in capsys.readouterr().err


def test_a_recipe_without_a_cluster_is_refused(capsys: Captured) -> None:
    assert main(["simulate", "ddp", "--recipe", "fsdp2"]) == 2
    assert "--recipe needs a model and a cluster" in capsys.readouterr().err


def test_a_step_is_timed_as_its_recipe_runs_it(capsys: Captured, tmp_path: Path) -> None:
    """With the framework's precision and sharding, where nobody says; a file may change any figure."""
    own, core = output(capsys, *STEP), output(capsys, *STEP, "--recipe", "megatron-core-tuned")
    assert (own["recipe"], core["recipe"]) == ("shardlab", "megatron-core-tuned")
    assert own["step_seconds"] != core["step_seconds"]
    assert core["plan"]["shard_optimizer"] == ["dp_shard"]
    assert own["plan"].get("shard_optimizer", []) == []
    assert output(capsys, *STEP, "--recipe", "fsdp2")["precision"] == "bf16-fp32-grads"
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "megatron-core-tuned"\nsource = "ours"\noverlap.blocking_p2p = 1.0\n')
    ours = output(capsys, *STEP, "--recipe", str(slow))
    assert ours["step_seconds"] > core["step_seconds"]
    assert ours["recipe"] == "slow"


def test_memory_beyond_tensors_is_reported_and_counts_for_the_limit(capsys: Captured) -> None:
    step = output(capsys, *STEP)
    parts = step["memory_held_by_part"]
    assert parts["tensors and standing buffers"] == step["peak_memory"]
    assert parts["context and communicators"] == pytest.approx(2**30)
    assert step["memory_held"] == pytest.approx(sum(parts.values()))
    assert main(["simulate", "grad-accum", "--model", "gpt2", "--cluster", "a100-40gbx1"]) == 0
    assert "of 40 GiB: tensors and standing buffers" in capsys.readouterr().out


def test_published_runs_are_predicted_as_any_recipe_runs_them(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one whose framework has no recipe. All in this process, as tests/cli/test_validate.py explains."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    runs = tmp_path / "runs.json"
    row = ROWS["titan-t1-8B-8gpu-eager"]
    runs.write_text(json.dumps([row, row | {"id": "ours", "framework": "ours"}]))
    usual, unknown = output(capsys, "validate", str(runs))
    assert unknown["predicted_s"] is None
    first, second = output(capsys, "validate", str(runs), "--recipe", "torchtitan")
    assert first["predicted_s"] == second["predicted_s"] != usual["predicted_s"]


def test_a_report_names_the_assumed_figures_that_it_rests_on(capsys: Captured) -> None:
    """Only of what the step uses: no network where there is one node, no recipe but its own."""
    assumed = output(capsys, *STEP)["assumed"]
    assert assumed["shardlab memory.context_bytes"]["value"] == 2**30
    assert {"nvlink4 efficiency", "h100 attention.flash2"} <= assumed.keys()
    assert not any("infiniband" in name or "float64" in name for name in assumed)
    core = output(capsys, *STEP, "--recipe", "megatron-core-tuned")["assumed"]
    assert "megatron-core-tuned overlap.share" in core
    assert not any(name.startswith(("shardlab", "h100")) for name in core), "cudnn's attention was fitted"
    assert main([*STEP]) == 0
    assert "assumed         shardlab memory.reserved, " in capsys.readouterr().out


# `shardlab schedule`: schedules go out as CSV, and come back with --schedule.


FORMS: list[CsvFormat] = ["compute_only", "compute_comms"]


def printed(capsys: Captured, *words: str) -> str:
    assert main(list(words)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return captured.out


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_csv_alone_is_printed(name: str, form: CsvFormat, capsys: Captured) -> None:
    stages = SCHEDULES[name].stages_per_rank or 2
    expected = csv_of(SCHEDULES[name], 2, 5, stages, form=form)
    assert printed(capsys, "schedule", name, "--pp", "2", "--microbatches", "5", "--form", form) == expected


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "dualpipe-v"])
def test_what_was_exported_is_checked_timed_and_exported_again_as_it_was(
    name: str, form: CsvFormat, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "schedule.csv"
    said = printed(capsys, "schedule", name, "--pp", "2", "--form", form, "--csv", str(file))
    assert said.startswith(f"{file}: {name} for 2 ranks, ")
    assert printed(capsys, "schedule", str(file), "--form", form) == file.read_text()
    imported = json.loads(printed(capsys, "simulate", "--pp", "2", "--schedule", str(file), "--json"))
    own = json.loads(printed(capsys, "simulate", name, "--pp", "2", "--json"))
    assert imported["backends"] == ["gloo", "nccl"]
    for fact in ("layers", "end", "bubble", "peak_memory"):
        assert imported[fact] == own[fact]


def test_a_file_can_be_turned_into_the_other_form(tmp_path: Path, capsys: Captured) -> None:
    texts = [printed(capsys, "schedule", "zb-v", "--pp", "2", "--form", form) for form in FORMS]
    for text, other, form in zip(texts, reversed(texts), reversed(FORMS), strict=True):
        file = tmp_path / "schedule.csv"
        file.write_text(text)
        assert printed(capsys, "schedule", str(file), "--form", form) == other


def test_json_has_the_rows(capsys: Captured) -> None:
    facts = json.loads(printed(capsys, "schedule", "gpipe", "--pp", "2", "--form", "compute_only", "--json"))
    assert (facts["ranks"], facts["stages"], facts["microbatches"]) == (2, 2, 4)
    assert facts["rows"] == [[f"{s}{kind}{m}" for kind in "FB" for m in range(4)] for s in range(2)]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0,0B0\n1F0,1X0\n", "row 2 (rank 1), column 2: '1X0' is no action"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "row 1 (rank 0), column 2, 0F0: this work is done twice"),
        ("0F0,0B0\n1F0\n", "row 2 (rank 1), column 1, 1F0: its backward pass 1B0, or 1I0 and 1W0, is missing"),
    ],
)
def test_a_file_that_is_no_schedule_is_refused_with_row_column_and_reason(
    text: str, sentence: str, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    for words in (["schedule", str(file)], ["simulate", "--pp", "2", "--schedule", str(file)]):
        assert main(words) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(f"shardlab: {file}: ")
        assert sentence in captured.err
