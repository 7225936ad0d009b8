"""Commands that do not exist are answered with the nearest one."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.cli import COMMANDS, main
from shardlab.cli.console import subcommand_names

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("word", "meaning"),
    [
        ("evaluate", "did you mean eval?"),
        ("generate", "did you mean sample?"),
        ("resume", "did you mean train --resume?"),
        ("Fine_Tune", "did you mean train --init?"),
        ("trian", "did you mean train?"),
    ],
)
def test_an_unknown_command_is_answered_with_what_was_meant(word: str, meaning: str, capsys: Captured) -> None:
    assert main([word, "runs/a"]) == 2
    lists = "(shardlab --help lists all commands)"
    assert capsys.readouterr().err == f"shardlab: there is no command {word!r}; {meaning} {lists}\n"


@pytest.mark.parametrize(("command", "says"), [("learn", "(default: watch)"), ("data", "(required)")])
def test_the_help_says_whether_a_subcommand_is_required(command: str, says: str, capsys: Captured) -> None:
    assert main([command, "--help"]) == 0
    assert says in capsys.readouterr().out


def test_an_unknown_command_of_the_course_is_answered_with_what_was_meant(capsys: Captured) -> None:
    assert main(["learn", "check"]) == 2
    assert "there is no command 'check'; did you mean watch? (shardlab learn --help lists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--hepl", "--hepl comes before the command; shardlab --help lists all commands"),
        ("--steps 3 train", "--steps comes before the command; shardlab --help lists all commands"),
        ("qqq", "there is no command 'qqq'; shardlab --help lists all commands"),
        ("learn chek-all", "there is no command 'chek-all'; did you mean check-all? (shardlab learn --help"),
        ("data prepair x.txt", "there is no command 'prepair'; did you mean prepare? (shardlab data --help"),
        ("data qqq", "there is no command 'qqq'; shardlab data --help lists all commands"),
        ("bench collectivs", "there is no command 'collectivs'; did you mean collectives? (shardlab bench --help"),
        ("checkpoint verfy runs/a", "there is no command 'verfy'; did you mean verify? (shardlab checkpoint --help"),
        ("schedule serach --pp 2", "there is no command 'serach'; did you mean search? (shardlab schedule --help"),
        ("data", "expected one of the commands prepare, shakespeare, show; --help tells more"),
        ("learn 1", "give one exercise: shardlab learn watch 1"),
    ],
)
def test_a_mistyped_command_of_a_group_is_answered_with_the_nearest(
    words: str, sentence: str, capsys: Captured
) -> None:
    assert main(words.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: {sentence}")
    assert said.count("\n") == 1


def test_every_group_of_commands_answers_a_mistyped_one(capsys: Captured) -> None:
    for name, kind in COMMANDS.items():
        for command in subcommand_names(kind):
            mistyped = f"{command[:-1]}q{command[-1]}"
            assert main([name, mistyped]) == 2
            said = capsys.readouterr().err
            assert said.startswith(f"shardlab: there is no command '{mistyped}'; did you mean {command}?"), said


def test_a_strategy_without_its_option_is_answered_with_the_option(capsys: Captured) -> None:
    assert main(["train", "fsdp", "--steps", "3"]) == 2
    assert capsys.readouterr().err == "shardlab: unexpected argument 'fsdp'; did you mean --strategy fsdp?\n"
    assert main(["simulate", "ddp", "fsdp"]) == 2
    assert "--strategy" not in capsys.readouterr().err


@pytest.mark.parametrize("words", ["view", "compare", "history", "show", "checkpoint ls", "sample --prompt x"])
def test_a_mistyped_run_is_answered_with_the_nearest_in_its_folder(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "fsdp-1").mkdir(parents=True)
    assert main([*words.split(), "run/fsdq-1"]) == 2
    assert capsys.readouterr().err == "shardlab: run/fsdq-1 does not exist; did you mean runs/fsdp-1?\n"
