"""`--help` shows the most used options first and the others in groups, and leaves out none."""

from __future__ import annotations

import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_args, get_type_hints

import pytest
import tyro

from shardlab.cli import COMMANDS, main
from shardlab.cli.console import GROUPS, MOST_USED, ONE_LIST

Captured = pytest.CaptureFixture[str]


def kinds_by_line() -> dict[str, type[Any]]:
    """Every command, and every command of a command, by its words."""
    found: dict[str, type[Any]] = {}
    for name, kind in COMMANDS.items():
        if "what" in (hints := get_type_hints(kind, include_extras=True)):
            for each in get_args(get_args(hints["what"])[0]):
                command, subcommand = get_args(each)
                found[f"{name} {subcommand.name}"] = command
        else:
            found[name] = kind
    return found


KINDS = kinds_by_line()


def options_of(kind: type[Any]) -> set[str]:
    """The options of a command, from its fields."""
    found: set[str] = set()
    hints = get_type_hints(kind, include_extras=True)
    for each in fields(kind):
        about = get_args(hints[each.name])[1:]
        if is_dataclass(each.default):
            found |= options_of(type(each.default))
        elif tyro.conf.Positional not in about and tyro.conf.Suppress not in about:
            found.add(f"--{each.name.replace('_', '-')}")
    return found


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns, in which each group is as wide as the terminal."""
    monkeypatch.setenv("COLUMNS", "80")


def help_of(line: str, capsys: Captured) -> str:
    assert main([*line.split(), "--help"]) == 0
    return capsys.readouterr().out


def listed(text: str) -> list[str]:
    """The options that have a line of their own, in order."""
    return re.findall(r"^[│ ] (--[a-z][a-z-]*)", text, re.MULTILINE)


def titles(text: str) -> list[str]:
    return re.findall(r"^(?:╭─)? ([a-z]+) options", text, re.MULTILINE)


@pytest.mark.parametrize("line", KINDS)
def test_help_lists_every_option_once_and_no_other(line: str, capsys: Captured) -> None:
    options, text = options_of(KINDS[line]), help_of(line, capsys)
    lines = listed(text)
    off = {option for option in options if option.startswith("--no-") and f"--{option[5:]}" in options}
    assert sorted(lines) == sorted(options - off)
    assert all(f"({option} turns it off)" in " ".join(re.sub("│", " ", text).split()) for option in off)


@pytest.mark.parametrize("line", KINDS)
def test_only_long_help_has_groups(line: str, capsys: Captured) -> None:
    text = help_of(line, capsys)
    shown, lines = titles(text), listed(text)
    assert shown == [group for group in GROUPS if group in shown]
    assert bool(shown) == (len(lines) > ONE_LIST)
    if shown:
        used = [f"--{name.replace('_', '-')}" for name in MOST_USED[line.split()[-1]].split()]
        assert lines[: len(used)] == used
        assert len(used) <= 10
        first = text.split(f" {shown[0]} options")[0]
        assert listed(first) == used, "an option has no group"


def test_every_group_is_shown_by_train(capsys: Captured) -> None:
    assert titles(help_of("train", capsys)) == list(GROUPS)


def test_the_first_screen_of_train_is_its_usage_its_purpose_and_ten_options(capsys: Captured) -> None:
    screen = help_of("train", capsys).splitlines()[:24]
    assert all(len(line) <= 80 for line in screen)
    assert screen[0].startswith("usage: shardlab train")
    assert screen[2].startswith("Train a language model")
    assert len(listed("\n".join(screen))) == 10


def test_the_list_of_commands_has_a_sentence_for_each(capsys: Captured) -> None:
    text = help_of("", capsys)
    shown = " ".join(text.split())
    for name, kind in COMMANDS.items():
        paragraphs = [" ".join(each.split()) for each in (kind.__doc__ or "").split("\n\n")]
        assert f"• {name} {paragraphs[0]}" in shown
        assert all(each not in shown for each in paragraphs[1:] if each)


@pytest.mark.parametrize("words", ["train --steps x --help", "train --compile --help", "submit --help -- train"])
def test_help_comes_before_mistakes_in_values(words: str, capsys: Captured) -> None:
    assert main(words.split()) == 0
    assert "usage: shardlab" in capsys.readouterr().out


@pytest.mark.parametrize("words", ["train --prompt --help", "train --bogus=1 --help=3"])
def test_a_wrong_line_is_refused_although_it_has_help_in_it(words: str, capsys: Captured) -> None:
    assert main(words.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("shardlab: ")
    assert captured.err.count("\n") == 1


def test_a_job_that_is_asked_for_help_is_no_question_for_help_of_submit(capsys: Captured) -> None:
    """As every word behind -- is one of the job."""
    assert main(["submit", "--dry-run", "--scheduler", "slurm", "--", "train", "--help"]) == 0
    assert "usage: shardlab" not in capsys.readouterr().out


def test_required_options_are_shown_as_such(capsys: Captured) -> None:
    assert any(each.default is MISSING for each in fields(KINDS["data prepare"]))
    assert "--out FOLDER" in help_of("data prepare", capsys)
    assert "(required)" in help_of("data prepare", capsys)
