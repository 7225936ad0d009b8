"""`shardlab train --plan auto` plans for this machine as it was measured."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.measure.saving import this_machine
from tests.cli.test_cluster import profile_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def configured(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["train", "--plan", "auto", "--ranks", "2", *words, "--print-config", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_batch_stays_and_its_microbatches_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    profile_of(this_machine()).write()
    config = configured(capsys)
    train = config["train"]
    assert train["microbatches"] * train["micro_batch_size"] == 16
    assert math.prod(config["plan"]["mesh"].values()) == 2
    assert configured(capsys) == config  # as every rank of a launched world finds


def test_flags_of_a_plan_are_not_left_open(capsys: pytest.CaptureFixture[str]) -> None:
    profile_of(this_machine()).write()
    assert configured(capsys, "--pp", "2", "--schedule", "gpipe")["plan"]["mesh"] == {"pp": 2}


def test_a_machine_that_was_not_measured_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--plan", "auto"]) == 2
    assert "shardlab bench" in capsys.readouterr().err
    profile_of(this_machine()).write()
    assert main(["train", "--plan", "auto", "--ranks", "2", "--batch-ramp", "0:2,5:4"]) == 2
    assert "batch ramp" in capsys.readouterr().err


def test_passes_rewrite_the_plan_that_is_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    profile_of(this_machine()).write()
    assert configured(capsys, "--passes", "all")["plan"] == configured(capsys)["plan"] | {"passes": "all"}
    assert main(["train", "--plan", "auto", "--ranks", "2", "--passes", "prefech"]) == 2
    assert "did you mean prefetch?" in capsys.readouterr().err
