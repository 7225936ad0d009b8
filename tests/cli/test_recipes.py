"""`shardlab recipes`, and `--recipe` on the commands that predict."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.predict.recipe import recipes
from tests.published.test_reading import ROWS

Captured = pytest.CaptureFixture[str]
STEP = ["simulate", "--pp", "2", "--dp-shard", "4", "--model", "gpt2", "--cluster", "h100x8", "--microbatches", "16"]


def told(captured: Captured, *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(captured.readouterr().out)


def test_every_recipe_is_listed_with_its_source(capsys: Captured) -> None:
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line[:1].isalpha()} >= recipes().keys()
    assert max(map(len, lines)) <= 80
    assert [each["name"] for each in told(capsys, "recipes")] == list(recipes())


def test_of_one_recipe_every_figure_is_told_with_where_it_is_from(capsys: Captured) -> None:
    assert main(["recipes", "megatron-core"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "reserved = 1.01 fitted to: the allocator's peak of two recipes" in said
    assert "share = tp 0.7, dp_shard 0.9, cp 0.7 assumed: round figures" in said
    assert "layer_norm 1 and 1.333" in said
    recipe = told(capsys, "recipes", "megatron-core")
    assert recipe["kernels"]["attention"] == "cudnn"
    figure = recipe["figures"]["memory.kept_when_full"]
    assert (figure["value"], figure["assumed"]) == (0.5, True)


@pytest.mark.parametrize("command", [["recipes", "megatron"], [*STEP, "--recipe", "megatron"]])
def test_an_unknown_recipe_is_a_sentence_with_the_nearest(command: list[str], capsys: Captured) -> None:
    assert main(command) == 2
    assert "there is no recipe 'megatron'; did you mean megatron-" in capsys.readouterr().err


def test_a_recipe_without_a_cluster_is_refused(capsys: Captured) -> None:
    assert main(["simulate", "ddp", "--recipe", "fsdp2"]) == 2
    assert "--recipe needs a model and a cluster" in capsys.readouterr().err


def test_a_step_is_timed_as_its_recipe_runs_it(capsys: Captured, tmp_path: Path) -> None:
    """With the framework's precision and sharding, where nobody says; a file may change any figure."""
    own, core = told(capsys, *STEP), told(capsys, *STEP, "--recipe", "megatron-core")
    assert (own["recipe"], core["recipe"]) == ("shardlab", "megatron-core")
    assert own["step_seconds"] != core["step_seconds"]
    assert core["plan"]["shard_optimizer"] == ["dp_shard"]
    assert own["plan"].get("shard_optimizer", []) == []
    assert told(capsys, *STEP, "--recipe", "fsdp2")["precision"] == "bf16-fp32-grads"
    slow = tmp_path / "slow.toml"
    slow.write_text('base = "megatron-core"\nsource = "ours"\noverlap.blocking_p2p = 1.0\n')
    ours = told(capsys, *STEP, "--recipe", str(slow))
    assert ours["step_seconds"] > core["step_seconds"]
    assert ours["recipe"] == "slow"


def test_what_is_held_beyond_tensors_is_told_and_counts_for_room(capsys: Captured) -> None:
    step = told(capsys, *STEP)
    parts = step["memory_held_by_part"]
    assert parts["tensors and standing buffers"] == step["peak_memory"]
    assert parts["context and communicators"] == pytest.approx(2**30)
    assert step["memory_held"] == pytest.approx(sum(parts.values()))
    assert main(["simulate", "grad-accum", "--model", "gpt2", "--cluster", "a100-40gbx1"]) == 0
    assert "of 40 GiB: tensors and standing buffers" in capsys.readouterr().out


def test_published_runs_are_predicted_as_any_recipe_runs_them(capsys: Captured, tmp_path: Path) -> None:
    """Also one whose framework has no recipe."""
    runs = tmp_path / "runs.json"
    row = ROWS["titan-t1-8B-8gpu-eager"]
    runs.write_text(json.dumps([row, row | {"id": "ours", "framework": "ours"}]))
    usual, unknown = told(capsys, "validate", str(runs))
    assert unknown["predicted_s"] is None
    first, second = told(capsys, "validate", str(runs), "--recipe", "torchtitan")
    assert first["predicted_s"] == second["predicted_s"] != usual["predicted_s"]


def test_a_report_names_the_assumed_figures_that_it_rests_on(capsys: Captured) -> None:
    """Only of what the step uses: no network where there is one node, no recipe but its own."""
    assumed = told(capsys, *STEP)["assumed"]
    assert assumed["shardlab memory.context_bytes"]["value"] == 2**30
    assert {"nvlink4 efficiency", "h100 attention.flash2"} <= assumed.keys()
    assert not any("infiniband" in name or "float64" in name for name in assumed)
    core = told(capsys, *STEP, "--recipe", "megatron-core")["assumed"]
    assert "megatron-core overlap.share" in core
    assert not any(name.startswith(("shardlab", "h100")) for name in core), "cudnn's attention was fitted"
    assert main([*STEP]) == 0
    assert "assumed         shardlab memory.reserved, " in capsys.readouterr().out
