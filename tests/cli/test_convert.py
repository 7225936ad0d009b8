"""`shardlab convert`: a run's folder to Hugging Face's form and back, as a user sees it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.models import GPT, Mixtral
from tests.exchange.folders import random_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    random_run(tmp_path / "run", GPT(layers=2, hidden_size=16, heads=2, seq_len=8))
    return tmp_path


def test_a_run_goes_out_and_back(folder: Path, capsys: Captured) -> None:
    assert main(["convert", "run", "hf"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "model           GPT, 14,912 parameters in 29 tensors",
        "folder          hf",
        "files           config.json, model.safetensors",
    ]
    assert main(["convert", "hf", "back", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "folder": "back",
        "form": "shardlab",
        "model": "GPT",
        "parameters": 14912,
        "tensors": 29,
        "files": ["run.json", "weights.safetensors"],
    }
    assert main(["convert", "back", "again"]) == 0
    assert (folder / "hf" / "model.safetensors").read_bytes() == (folder / "again" / "model.safetensors").read_bytes()


def test_flags_change_the_model(folder: Path, capsys: Captured) -> None:
    random_run(folder / "experts", Mixtral(layers=1, hidden_size=16, heads=2, seq_len=8))
    assert main(["convert", "experts", "hf"]) == 2
    assert "capacity_factor is 1.25, not None" in capsys.readouterr().err
    assert main(["convert", "experts", "hf", "--capacity-factor", "none"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "run"], "run exists; name a new folder, so that nothing is overwritten"),
        (["nowhere", "hf"], "nowhere does not exist; name the folder of a run, or one in Hugging Face's form"),
        (["run", "hf", "--heads", "3"], "hidden_size 16 does not divide by 3 heads"),
        (["run", "hf", "--layers", "3"], "run lacks 15 tensors of its model's 41: layers.2.attn.c_attn.bias"),
        (["run", "hf", "--shard-mb", "0"], "--shard-mb: 0 is too few; give 1 or more"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(
    folder: Path, capsys: Captured, arguments: list[str], said: str
) -> None:
    assert main(["convert", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("shardlab: ")
    assert said in err
    assert [path.name for path in folder.iterdir()] == ["run"]
