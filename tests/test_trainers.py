"""The table of trainers: each of our cells that says yes is followed by a command, and its options are there."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from shardlab.cli import main

PAGE = (Path(__file__).parents[1] / "docs" / "trainers.md").read_text(encoding="utf-8")
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
COMMANDS = sorted(set(re.findall(r"`(shardlab [^`]+)`", PAGE)))


def test_what_says_yes_has_a_command_and_nothing_else_has() -> None:
    features = {row[0]: row[1] for row in ROWS if len(row) == 9 and set(row[0]) != {"-"}}
    features_with_commands = [row[0] for row in ROWS if len(row) == 2 and set(row[0]) != {"-"}][1:]
    features.pop("feature")
    assert all(re.match("(yes|no)\\b", cell) for cell in features.values())
    assert features_with_commands == [name for name, cell in features.items() if cell.startswith("yes")]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_all_of_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, name, *words = shlex.split(command)
    subcommand = [name, *([words.pop(0)] if name in ("data", "bench") else [])]
    assert main([*subcommand, "--help"]) == 0
    printed = capsys.readouterr().out
    for option in (word for word in words if word.startswith("--")):
        assert re.search(rf"(?<![\w-]){option}(?![\w-])", printed), f"shardlab {' '.join(subcommand)} has no {option}"
