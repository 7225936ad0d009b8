"""`shardlab strategies` and the command line around the commands."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from shardlab.cli import COMMANDS, main
from shardlab.cli.strategies import print_table, sent_by
from shardlab.strategies import STRATEGIES

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize("width", [80, 160])
def test_the_table_says_of_every_strategy_what_it_splits_sends_and_keeps_and_fits_the_terminal(width: int) -> None:
    stream = io.StringIO()
    print_table(Console(file=stream, width=width, highlight=False))
    text = stream.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()
    for entry in STRATEGIES.values():
        assert entry.name in text
        assert entry.memory in text
        assert str(sent_by(entry)) in " ".join(text.split()) or width == 160
    assert "sends 2.25 W in 24 collectives" in text or width == 160
    assert "fsdp is the page to read" in " ".join(text.split()), "how it differs from zero-3"


def test_json_lists_the_same_alone(capsys: Captured) -> None:
    assert main(["strategies", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == list(STRATEGIES)
    assert all(set(row) == {"name", "splits", "sends", "keeps", "source"} for row in rows.values())
    assert all(row["keeps"] and row["source"] and row["splits"] for row in rows.values())
    assert rows["ddp"]["sends"]["weights"] == 1.5
    assert rows["gpipe"]["sends"]["messages"] == rows["gpipe"]["sends"]["activations"] == 16
    assert rows["single"]["sends"]["bytes"] == 0


@pytest.mark.parametrize(
    "command",
    [
        *(name for name in COMMANDS if name not in ("bench", "data", "checkpoint")),
        *("bench collectives", "bench compute", "data prepare", "data shakespeare", "data show"),
        *("checkpoint ls", "checkpoint verify", "checkpoint convert"),
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
