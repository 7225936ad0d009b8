"""`--cluster local` in every command: this machine as it was measured, and another one's profile only by force."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.measure.profile import this_machine
from shardlab.simulate.hardware import AlphaBeta, Machine, Profile, Rate

Captured = pytest.CaptureFixture[str]

SIMULATE = ["simulate", "fsdp", "--ranks", "2", "--model", "gpt2", "--layers", "4", "--cluster", "local"]
OTHER = Machine("another CPU", 64, "2.0", "gloo")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def profile_of(machine: Machine) -> Profile:
    """A machine whose kernels and collectives take more than a second each."""
    collectives = {(kind, 2): AlphaBeta(1.0, 0.0) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    families = ("matmul", "attention", "pointwise", "update")
    return Profile(
        machine,
        collectives,
        AlphaBeta(1.0, 0.0),
        {(family, "float32"): Rate(1.0, 1e12, 1e12) for family in families},
        1e12,
    )


def refused(capsys: Captured, *arguments: str) -> str:
    """The one line that a mistake is told in."""
    assert main([*arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    (line,) = output.err.splitlines()
    return line


def step_of(capsys: Captured, *arguments: str) -> float:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["step_seconds"]


def test_simulate_takes_the_profile_of_another_machine_only_if_asked_to(capsys: Captured) -> None:
    profile_of(OTHER).write()
    assert "is from another machine: processor another CPU there" in refused(capsys, *SIMULATE)
    assert step_of(capsys, *SIMULATE, "--other-machine") > 1


def test_this_machines_own_profile_needs_no_flag(capsys: Captured) -> None:
    profile_of(this_machine()).write()
    assert step_of(capsys, *SIMULATE) == step_of(capsys, *SIMULATE, "--other-machine")


def test_a_profile_in_a_file_is_named_as_a_cluster_file_is(tmp_path: Path, capsys: Captured) -> None:
    mine, theirs = (
        profile_of(this_machine()).write(tmp_path / "Mine.json"),
        profile_of(OTHER).write(tmp_path / "o.json"),
    )
    assert step_of(capsys, *SIMULATE[:-1], str(mine)) > 1
    assert "is from another machine" in refused(capsys, *SIMULATE[:-1], str(theirs))
    assert step_of(capsys, *SIMULATE[:-1], str(theirs), "--other-machine") > 1
    assert "there is no profile at none.json" in refused(capsys, *SIMULATE[:-1], "none.json")


def test_where_there_is_no_profile_none_is_taken(capsys: Captured) -> None:
    assert "there is no profile at" in refused(capsys, *SIMULATE, "--other-machine")


def test_what_is_no_profile_is_from_no_machine(capsys: Captured) -> None:
    gpu = [*SIMULATE[:-1], "h100x2", "--other-machine"]
    assert "--other-machine is for profiles, and h100x2 is not a profile; give --cluster local" in refused(capsys, *gpu)
    assert "--other-machine needs a model and a cluster" in refused(capsys, "simulate", "fsdp", "--other-machine")


def test_bench_refuses_the_file_of_another_machine_before_it_measures(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = profile_of(OTHER).write(tmp_path / "theirs.json")
    monkeypatch.setattr("shardlab.train.launch.ranks.run_ranks", None)
    line = refused(capsys, "bench", "collectives", "--ranks", "2", "--profile", str(path))
    assert "is from another machine: processor another CPU there" in line
    assert "give --profile another file" in line
