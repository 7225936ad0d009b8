"""`shardlab train --plan auto` plans for this machine as it was measured."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.cli.plan_options import NO_FLAGS
from shardlab.cli.train.auto_plan import PlannedRun, PlannedRuns, measure_fastest, plan_for_this_machine
from shardlab.common.errors import UserError
from shardlab.measure.profile import this_machine
from shardlab.measure.progress import Race
from shardlab.planner.search import Budget, Search
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config_sources import ConfigSource, preset_source
from shardlab.train.faults import RankFailed
from shardlab.train.job import Job
from shardlab.train.launch.ranks import RENDEZVOUS, Rendezvous
from shardlab.train.run import TrainingRun
from tests.cli.test_plan_options_cluster import profile_of


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
    output: list[str] = []

    class Meeting:
        rank = 0

        def __init__(self, world: object, timeout: timedelta) -> None:
            assert timeout == timedelta(minutes=10), "the run's --timeout"

        def all(self, act: Callable[[], str]) -> str:
            return act()

        def exchange(self, word: str) -> list[str]:
            output.append(word)
            return [word or output[0], ""]

    monkeypatch.setattr("shardlab.train.launch.commands.RankExchange", Meeting)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    profile_of(this_machine()).write()
    first = configured(capsys, "--tp", "2")
    monkeypatch.setattr(Meeting, "rank", 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", "/nowhere")
    planned = plan_for_this_machine(NO_FLAGS, [preset_source("default")], 2, measure=True, tell=False)
    assert output[-1] == "", "only the first chooses"
    assert planned.runs[0].config.plan.as_dict()["mesh"] == first["plan"]["mesh"] == {"tp": 2}


@lru_cache
def planned(measure: bool = True, steps: int = 200) -> PlannedRuns:
    """The default model on two ranks of a machine whose steps take minutes."""
    profile_of(this_machine()).write()
    sources = [preset_source("default"), ConfigSource("flags", {"train": {"steps": steps}})]
    return plan_for_this_machine(NO_FLAGS, sources, 2, measure=measure, tell=False)


def winner(runs: PlannedRuns, prove: Callable[[StrategyEntry, TrainingRun], object] = print) -> PlannedRun:
    return measure_fastest(runs, TrainingRun(runs.runs[0].config, Path()), prove, RENDEZVOUS, tell=True)


def test_ctrl_c_while_the_plan_is_searched_begins_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reach = Search._reach  # pyright: ignore[reportPrivateUsage]

    def interrupt(search: Search, goal: Any, budget: Budget) -> bool:
        reach(search, goal, budget)
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_reach", interrupt)
    with pytest.raises(KeyboardInterrupt):
        planned.__wrapped__()


def test_only_where_a_run_is_long_do_plans_take_turns() -> None:
    choice = planned()
    assert len(choice.runs) > 1
    for alone in planned(steps=1), planned(measure=False):
        assert [run.config.plan for run in alone.runs] == [choice.runs[0].config.plan]


def test_of_plans_that_may_be_the_fastest_the_one_is_taken_whose_steps_are_shortest(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each takes turns as it is trained, after its passes; one that cannot be run has none."""
    raced: list[Job] = []

    def run_ranks(ranks: int, function: object, jobs: list[Job], race: Race, joining: Rendezvous) -> list[float]:
        raced[:] = jobs
        return [3.0 - at for at in range(len(jobs))]

    monkeypatch.setattr("shardlab.train.launch.ranks.run_ranks", run_ranks)
    choice = planned()
    assert winner(choice) is choice.runs[-1]
    assert len(raced) == len(choice.runs)
    for job, run in zip(raced, choice.runs, strict=True):
        assert isinstance(job.strategy, Plan)
        assert job.strategy.passes is not None
        assert replace(job.strategy, passes=None) == run.config.plan.strategy
    output = capsys.readouterr().err
    assert f"{len(raced)} plans that may be the fastest are measured in turns" in output
    assert f"--plan auto chooses {choice.runs[-1].name}" in output

    def prove(entry: StrategyEntry, run: TrainingRun) -> None:
        if run.config.plan.as_dict()["schedule"] == choice.runs[0].config.plan.as_dict()["schedule"]:
            raise UserError("this plan cannot be run")

    raced.clear()
    assert winner(choice, prove) is choice.runs[1]
    assert not raced, "one alone has no turns"


def test_where_plans_fail_to_take_turns_the_one_that_is_predicted_fastest_is_taken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_ranks(*_: object, **__: object) -> list[float]:
        raise RankFailed("rank 1 failed\nTraceback ...\nMemoryError")

    monkeypatch.setattr("shardlab.train.launch.ranks.run_ranks", run_ranks)
    choice = planned()
    assert winner(choice) is choice.runs[0]
    assert "plans were not measured (rank 1 failed; MemoryError); --plan auto chooses " in capsys.readouterr().err


@pytest.mark.starts_ranks
def test_a_run_whose_plans_took_turns_is_trained_and_goes_on_with_its_plan_and_microbatches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Here it may take turns for ten times as long as it is trained, but does so for two rounds."""
    monkeypatch.setattr("shardlab.cli.train.auto_plan.MEASURING_SHARE", 10)
    monkeypatch.setattr("shardlab.cli.train.auto_plan.Race", partial(Race, rounds=2))
    profile_of(this_machine()).write()
    model = "--layers 4 --hidden-size 16 --heads 2 --seq-len 8 --microbatches 16 --micro-batch-size 1"
    words = ["train", "--plan", "auto", "--ranks", "2", *model.split(), "--save-every", "2"]
    words += ["--out", str(tmp_path / "run")]
    assert main([*words, "--steps", "2"]) == 0
    output = capsys.readouterr()
    assert "--plan auto predicts to be the fastest" in output.err
    assert "measured a step" in output.err
    ran = tomllib.loads((tmp_path / "run" / "config.toml").read_text(encoding="utf-8"))
    assert ran["batch"]["microbatches"] < 16, "it is cheaper to take sequences together"
    assert main([*words, "--pp", "2", "--resume", "auto", "--steps", "4", "--print-config", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    for name in ("microbatches", "micro_batch_size"):
        assert again["train"][name] == ran["batch"][name]
    assert again["plan"]["schedule"] == ran["plan"]["schedule"]
    assert again["plan"]["passes"] == ran["plan"]["passes"]


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
