"""What goes into a pipe."""

from __future__ import annotations

import re
import sys
import sysconfig
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardlab.cli import main
from shardlab.cli.console import PEERS, meant_by
from shardlab.cli.launch import Submit
from shardlab.cli.options import option_names
from shardlab.cli.plan.command import PlanCommand
from shardlab.cli.sample import Sample
from shardlab.cli.simulate.command import Simulate
from shardlab.cli.train.command import Train
from shardlab.cli.verify import Verify


@pytest.mark.parametrize(
    "command",
    [
        ["strategies"],
        ["simulate", "fsdp"],
        ["simulate", "ddp", "--ranks", "2", "--model", "gpt2", "--cluster", "a100-40gbx2"],
    ],
)
def test_lines_in_a_pipe_end_without_blanks(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []


# Options that a command does not have are answered with what was meant, also in the words of other tools.


EMPTY = [Train(), Simulate(), PlanCommand(), Verify(), Submit(), Sample(Path("run"))]
"""Commands with options that peers have as well."""

PACKAGE = f"{sysconfig.get_path('purelib')}/torch/nn/__init__.py"
Captured = pytest.CaptureFixture[str]
STEP = "a step has --microbatches of --micro-batch-size sequences"


@pytest.mark.parametrize(
    ("command", "option", "meaning"),
    [
        ("train", "--lr", "did you mean --learning-rate?"),
        ("train", "--dtype", "did you mean --precision?"),
        ("train", "--device", "each of --ranks uses a GPU if the host has one for each"),
        ("train", "--max-steps", "did you mean --steps?"),
        ("train", "--block-size", "did you mean --seq-len?"),
        ("train", "--output-dir", "did you mean --out?"),
        ("train", "--batch-size", STEP),
        ("train", "--global-batch", STEP),
        ("train", "--num_train_epochs=3", "a run's length is in --steps"),
        ("train", "--N-Layer", "did you mean --layers?"),
        ("train", "--tokenizer", "the tokenizer comes from the folder in --data"),
        ("train", "--stepz", "did you mean --steps?"),
        ("train", "--zzz", "--help lists them"),
        ("simulate", "--global-batch-size", "did you mean --global-batch?"),
        ("simulate", "--dtype", "did you mean --precision?"),
        ("verify", "--lr", "did you mean --layers?"),  # it has no learning rate
        ("submit", "--ntasks-per-node", "did you mean --ranks-per-node?"),
    ],
)
def test_an_unknown_option_is_answered_with_what_was_meant(
    command: str, option: str, meaning: str, capsys: Captured
) -> None:
    assert main([command, option, "3"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: there is no option {option}; {meaning}")
    assert said.count("\n") == 1


def test_every_meaning_is_an_option_or_speaks_of_options_and_no_peer_is_answered_with_itself() -> None:
    known = [{f"--{name.replace('_', '-')}" for name in option_names(command)} for command in EMPTY]
    for meaning, peers in PEERS.items():
        options = set(re.findall("--[a-z-]+", meaning))
        having = [flags for flags in known if options <= flags]
        assert options
        assert having, meaning
        for peer in peers.split():
            assert f"--{peer}" not in options
            assert any(meant_by(f"--{peer}", flags) in (meaning, f"did you mean {meaning}?") for flags in having), peer


@pytest.mark.parametrize(
    ("error", "denied"),
    [
        (ModuleNotFoundError("No module named 'unittest'", name="unittest"), sysconfig.get_path("stdlib")),
        (PermissionError(13, "Permission denied", sys.executable), sys.executable),
        (ModuleNotFoundError("No module named 'torch'", name="torch.cuda"), f"{sysconfig.get_path('purelib')}/torch"),
        (PermissionError(13, "Permission denied", PACKAGE), PACKAGE),
    ],
)
def test_a_user_who_may_not_read_pythons_own_files_gets_a_sentence(
    error: Exception, denied: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("shardlab.cli.listings.Strategies.run", Mock(side_effect=error))
    monkeypatch.setattr("shardlab.cli.console._is_denied", Path(denied).__eq__)
    assert main(["strategies"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"shardlab: this user has no permission to read {denied}, which this Python needs (")
    assert said.count("\n") == 1


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'x'", name="x"), OSError(28, "No space left")])
def test_other_errors_of_files_and_modules_are_not_taken_for_that(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardlab.cli.listings.Strategies.run", Mock(side_effect=error))
    with pytest.raises(type(error)):
        main(["strategies"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("convert runs/a", "missing from shardlab convert: TO; --help tells more"),
        ("train --steps", "missing value for argument '--steps'. Expected 1 values; --help tells more"),
        ("train --freeze 0-1", "--freeze: '0-1' does not fit; give --freeze N ..."),
        ("train --betas 0.9", "--betas: '0.9' does not fit; give --betas FLOAT FLOAT"),
        ("train --betas 0.9 x", "--betas: '0.9', 'x' does not fit; give --betas FLOAT FLOAT"),
    ],
)
@pytest.mark.parametrize("terminal", [False, True])
def test_a_word_that_does_not_fit_is_one_plain_sentence_also_in_a_terminal(
    words: str, sentence: str, terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"shardlab: {sentence}\n"
