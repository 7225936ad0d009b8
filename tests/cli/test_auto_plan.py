"""`shardlab train --plan auto` plans for this machine as it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.cli.auto_plan import planned_here
from shardlab.cli.plan_options import NO_FLAGS
from shardlab.measure.race import Race
from shardlab.measure.saving import this_machine
from shardlab.strategies.plan import Plan
from shardlab.train.config_sources import ConfigSource, preset
from shardlab.train.job import Job
from shardlab.train.processes import RankFailed
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
    assert configured(capsys) == config


def test_a_launchers_ranks_take_the_plan_that_the_first_of_them_has_chosen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host of another rank was not measured, or would choose another plan."""
    told: list[str] = []

    class Meeting:
        rank = 0

        def __init__(self, world: object) -> None: ...

        def all(self, act: Callable[[], str]) -> str:
            return act()

        def exchange(self, word: str) -> list[str]:
            told.append(word)
            return [told[0], ""]

    monkeypatch.setattr("shardlab.train.stores.Together", Meeting)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    profile_of(this_machine()).write()
    first = configured(capsys, "--tp", "2")
    monkeypatch.setattr(Meeting, "rank", 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    _, config = planned_here(NO_FLAGS, [preset("default")], 2, measure=True, tell=False)
    assert told[-1] == "", "only the first chooses"
    assert config.plan.as_dict()["mesh"] == first["plan"]["mesh"] == {"tp": 2}


def test_of_plans_that_may_be_the_fastest_the_one_is_taken_whose_steps_are_shortest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes turns as it is trained, after its passes; a run too short for that takes the predicted one."""
    raced: list[list[Job]] = []

    def run_ranks(ranks: int, function: object, jobs: list[Job], race: Race) -> list[float]:
        raced.append(jobs)
        return [2.0, 1.0, *(3.0 for _ in jobs[2:])]

    monkeypatch.setattr("shardlab.train.launch.run_ranks", run_ranks)
    profile_of(this_machine()).write()
    long, short = [preset("default")], [preset("default"), ConfigSource("flags", {"train": {"steps": 1}})]
    _, config = planned_here(NO_FLAGS, long, 2, measure=True, tell=True)
    (jobs,) = raced
    first, second = (job.strategy for job in jobs[:2])
    assert isinstance(first, Plan)
    assert isinstance(second, Plan)
    assert first.passes is not None
    assert second.passes is not None
    assert config.plan.strategy == replace(second, passes=None) != replace(first, passes=None)
    told = capsys.readouterr().err
    assert f"{len(jobs)} plans that may be the fastest take turns" in told
    assert ": 1.00 s; " in told
    _, config = planned_here(NO_FLAGS, short, 2, measure=True, tell=False)
    assert len(raced) == 1
    assert config.plan.strategy == replace(first, passes=None)


def test_where_plans_fail_to_take_turns_the_one_that_is_predicted_fastest_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: object) -> list[float]:
        raise RankFailed("rank 1 failed\nTraceback ...\nMemoryError")

    monkeypatch.setattr("shardlab.train.launch.run_ranks", run_ranks)
    profile_of(this_machine()).write()
    _, predicted = planned_here(NO_FLAGS, [preset("default")], 2, measure=False, tell=False)
    _, config = planned_here(NO_FLAGS, [preset("default")], 2, measure=True, tell=True)
    assert config == predicted
    assert "no turns were taken (rank 1 failed; MemoryError); --plan auto takes " in capsys.readouterr().err


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
