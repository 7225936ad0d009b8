"""`shardlab strategies` and the command line around the commands."""

from __future__ import annotations

import json

import pytest

from shardlab.cli import COMMANDS, main
from shardlab.strategies import STRATEGIES

Captured = pytest.CaptureFixture[str]


def test_every_strategy_is_listed_with_what_it_splits_and_its_source(capsys: Captured) -> None:
    assert main(["strategies"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    for entry in STRATEGIES.values():
        assert entry.name in out
    assert "the batch Li et al. 2020" in out


def test_json_lists_the_same_alone(capsys: Captured) -> None:
    assert main(["strategies", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == list(STRATEGIES)
    assert all(set(row) == {"name", "splits", "source"} for row in rows)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    captured = capsys.readouterr()
    assert f"usage: shardlab {command}" in captured.out
    assert "--json" in captured.out


def test_without_a_command_the_commands_are_named(capsys: Captured) -> None:
    assert main([]) == 2
    err = capsys.readouterr().err
    assert all(command in err for command in COMMANDS)
