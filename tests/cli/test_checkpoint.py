"""shardlab checkpoint: what a run has, whether it is as it was written, and whole weights of it."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from shardlab.cli import main
from shardlab.models import GPT
from shardlab.train.huggingface.sources import initial_from
from shardlab.train.job import Job
from tests.support.ranks import Ranks
from tests.train.checkpoint.runs import saving_run, trained

pytestmark = pytest.mark.starts_ranks
World = Callable[[int], Ranks]
Captured = pytest.CaptureFixture[str]
MODEL = GPT(layers=2, hidden_size=16, heads=2, seq_len=8)


@pytest.fixture
def run(ranks: World, tmp_path: Path) -> Path:
    """A run of 5 steps with checkpoints after 4 and 5."""
    ranks(2).call(trained, saving_run(Job("fsdp", 2, 4, MODEL, 2), tmp_path / "run"))
    return tmp_path / "run"


def harm(run: Path) -> Path:
    path = run / "checkpoints" / "step-000005" / "rank-0001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    return path


def test_a_run_s_checkpoints_are_listed(run: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "ls", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [["4", "fsdp", "2"], ["5", "fsdp", "2"]]
    assert lines[3] == f"resume with: shardlab train --resume {run}"
    assert main(["checkpoint", "ls", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [row["step"] for row in rows] == [4, 5]
    assert rows[0]["kinds"] == ["exp_avg", "exp_avg_sq", "weights"]


def test_a_flipped_bit_is_found_and_named(run: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "verify", str(run)]) == 0
    assert capsys.readouterr().out.count("checksums are right") == 2
    path = harm(run)
    assert main(["checkpoint", "verify", str(run)]) == 1
    said = capsys.readouterr().out
    assert "damaged" in said
    assert f"{path} has changed" in said


def test_whole_weights_are_those_that_the_run_has_written(run: Path, tmp_path: Path, capsys: Captured) -> None:
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "whole"), "--to", "shardlab"]) == 0
    weights, expected = (load_file(folder / "weights.safetensors") for folder in (tmp_path / "whole", run))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert main(["checkpoint", "convert", str(run), str(tmp_path / "hf"), "--step", "4"]) == 0
    assert (tmp_path / "hf" / "config.json").is_file()


def test_a_checkpoint_is_where_other_runs_may_begin(run: Path) -> None:
    for layer in range(MODEL.layers):
        ranges = [(0, MODEL.layout(layer).numel)]
        weights, expected = (
            initial_from(folder, MODEL)(layer, MODEL.layout(layer).numel, ranges, torch.float32)
            for folder in (run / "checkpoints" / "step-000005", run)
        )
        assert torch.equal(weights, expected)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("ls {run}/nowhere", "{run}/nowhere does not exist; name the folder of a run"),
        ("verify {run}/checkpoints", "{run}/checkpoints has no checkpoints; name the folder of a run"),
        ("convert {run} {run}", "{run} exists; name a new folder"),
        ("convert {run} {run}/x --step 1", "{run} has no checkpoint after step 1; it has those after steps 4-5"),
    ],
)
def test_what_cannot_be_is_one_sentence(words: str, sentence: str, run: Path, capsys: Captured) -> None:
    assert main(["checkpoint", *words.format(run=run).split()]) == 2
    assert capsys.readouterr().err.startswith("shardlab: " + sentence.format(run=run))
