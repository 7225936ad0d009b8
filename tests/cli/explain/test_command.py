"""`shardlab explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main

EXAMPLES = Path(__file__).parents[3] / "examples" / "frameworks"

Captured = pytest.CaptureFixture[str]


def out_of(words: list[str], capsys: Captured, status: int = 0) -> str:
    assert main(["explain", *words]) == status
    captured = capsys.readouterr()
    return captured.err if status else captured.out


def test_one_screen_has_the_prediction_and_the_changes(capsys: Captured) -> None:
    text = out_of([str(EXAMPLES / "llama3_8b.toml"), "--cluster", "h100x8"], capsys)
    for part in ("understood", "plan", "step time", "tokens/s", "MFU", "time goes to", "does not fit", "change"):
        assert part in text
    assert len(text.splitlines()) <= 40
    assert "compile.enable = true" in text


def test_json_has_the_same(capsys: Captured) -> None:
    words = [str(EXAMPLES / "train_70b.sh"), "--cluster", "h100", "--json", "--changes", "0"]
    data = json.loads(out_of(words, capsys))
    assert (data["framework"], data["fits"], data["not_understood"]) == ("megatron", True, [])
    assert {"key": "--bf16", "value": True, "line": 41} in data["understood"]
    assert data["plan"]["mesh"] == {"pp": 4, "dp_shard": 2, "tp": 8}


def test_overrides_change_the_file(capsys: Captured) -> None:
    words = [str(EXAMPLES / "llama3_8b.toml"), "--cluster", "h100x8", "--json", "--changes", "0"]
    whole = json.loads(out_of(words, capsys))
    less = json.loads(out_of([*words, "--", "--training.local_batch_size=1"], capsys))
    assert less["micro_batch_size"] == 1
    assert less["memory"] < whole["memory"]


def test_unknown_keys_are_named(capsys: Captured, tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text((EXAMPLES / "llama3_8b.toml").read_text() + "\n[training_extra]\nfaster = true\n")
    text = out_of([str(path), "--cluster", "h100x8", "--changes", "0"], capsys)
    assert f"training_extra.faster (line {len(path.read_text().splitlines())})" in text


def test_verbose_names_every_unknown_key(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    unknown = "".join(f"unknown_{letter} = 1\n" for letter in "abcdefgh")
    file.write_text((EXAMPLES / "llama3_8b.toml").read_text() + f"\n[mine]\n{unknown}")
    words = [str(file), "--cluster", "h100x8", "--changes", "0"]
    assert "2 more (--verbose lists all)" in " ".join(out_of(words, capsys).split())
    text = " ".join(out_of([*words, "--verbose"], capsys).split())
    assert "mine.unknown_h" in text
    assert "more (--verbose" not in text


def test_devices_are_asked_for_in_a_sentence(capsys: Captured) -> None:
    assert "--cluster h100x64" in out_of([str(EXAMPLES / "llama3_8b.toml")], capsys, 2)
    assert "its number of devices is 64" in out_of([str(EXAMPLES / "train_70b.sh")], capsys, 2)
    assert "--cluster h100x64" in out_of([str(EXAMPLES / "llama3_8b.toml"), "--cluster", "h100"], capsys, 2)


def test_a_device_alone_takes_the_scripts_number(capsys: Captured) -> None:
    words = [str(EXAMPLES / "train_70b.sh"), "--json", "--changes", "0", "--model", "llama3-8b"]
    alone = json.loads(out_of([*words, "--cluster", "a100-80gb"], capsys))
    named = json.loads(out_of([*words, "--cluster", "a100-80gbx64"], capsys))
    assert alone == named


def test_the_memory_of_the_devices_can_be_limited(capsys: Captured) -> None:
    words = [str(EXAMPLES / "llama3_8b.toml"), "--cluster", "h100x8", "--json", "--changes", "0", "--memory", "30GiB"]
    assert json.loads(out_of(words, capsys))["device_memory"] == 30 * 2**30


def test_another_model_replaces_the_configurations(capsys: Captured) -> None:
    words = [str(EXAMPLES / "train_70b.sh"), "--cluster", "h100", "--json", "--changes", "0", "--model", "llama3-8b"]
    assert json.loads(out_of(words, capsys))["model"] == "llama3-8b"


def test_a_log_is_compared_with_the_prediction(capsys: Captured) -> None:
    """docs/frameworks.md shows the same as text."""
    words = [str(EXAMPLES / "train_70b.sh"), "--cluster", "h100", "--changes", "0", "--measured"]
    data = json.loads(out_of([*words, str(EXAMPLES / "train_70b_log.txt"), "--json"], capsys))
    assert data["measured"]["memory_kind"] == "reserved"
    assert data["measured"]["could_be"]


def test_a_wrong_measurement_is_refused_in_a_sentence(capsys: Captured) -> None:
    words = [str(EXAMPLES / "train_70b.sh"), "--cluster", "h100", "--measured", "speed=3"]
    assert "tokens/s=52000" in out_of(words, capsys, 2)
