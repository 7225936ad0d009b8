"""What goes into a pipe."""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from io import StringIO
from pathlib import Path
from typing import Any, get_args, get_type_hints
from unittest.mock import Mock

import pytest
import tyro
from rich.console import Console
from rich.text import Text

from shardlab.cli import COMMANDS, main
from shardlab.cli.console import ONE_LIST, Report, help_tables, print_fact, print_line, subcommand_names, suggest_option
from shardlab.cli.launch import Submit
from shardlab.cli.learn.command import Learn
from shardlab.cli.options import option_values
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


# A long line is broken between words.


def printed(width: int, draw: Callable[[Console], None], *, terminal: bool = True) -> list[str]:
    file = StringIO()
    draw(Console(file=file, width=width, force_terminal=terminal, color_system=None, highlight=False))
    return file.getvalue().splitlines()


def test_a_fact_is_broken_between_words_and_its_path_stays_whole() -> None:
    path = "/data/a-user/runs-of-today/with-a-long-name/fsdp-1"
    text = f"after step 20 of this long run: shardlab train --resume {path} --steps 40"
    lines = printed(60, lambda console: print_fact(console, "go on", text))
    assert lines == [
        "go on           after step 20 of this long run: shardlab",
        "                train --resume",
        f"{' ' * 10}{path}",
        "                --steps 40",
    ]
    longer = f"{path}/{path}"
    assert printed(60, lambda console: print_fact(console, "out", longer)) == ["out             ", longer]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_line_is_broken_in_a_terminal_only(terminal: bool) -> None:
    text = "resume with: shardlab train --resume runs/fsdp-1"
    lines = printed(40, lambda console: print_line(console, Text(text)), terminal=terminal)
    assert lines == (["resume with: shardlab train --resume", "runs/fsdp-1"] if terminal else [text])


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
        ("train", "--tp_size", "did you mean --tp?"),
        ("train", "--optimizer.lr", "did you mean --learning-rate?"),
        ("train", "--training.local_batch_size", "did you mean --micro-batch-size?"),
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


def test_every_command_that_is_suggested_exists_and_no_name_for_it_is_a_command() -> None:
    for meaning, names in help_tables()["peer commands of shardlab"].items():
        command, *options = meaning.split(" --")
        assert command in COMMANDS or command.split()[0] in COMMANDS
        assert not set(names.split()) & set(COMMANDS)
        kind = next((candidate for candidate in EMPTY if command == type(candidate).__name__.lower()), None)
        assert not options or (kind is not None and options[0] in option_values(kind)), meaning
    own = subcommand_names(Learn)
    for meaning, names in help_tables()["peer commands of shardlab learn"].items():
        assert meaning in own
        assert not set(names.split()) & set(own)


def test_every_meaning_is_an_option_or_speaks_of_options_and_no_peer_is_answered_with_itself() -> None:
    known = [{f"--{name.replace('_', '-')}" for name in option_values(command)} for command in EMPTY]
    for meaning, peers in help_tables()["peers"].items():
        options = set(re.findall("--[a-z-]+", meaning))
        having = [flags for flags in known if options <= flags]
        assert options
        assert having, meaning
        for peer in peers.split():
            assert f"--{peer}" not in options
            assert any(
                suggest_option(f"--{peer}", flags) in (meaning, f"did you mean {meaning}?") for flags in having
            ), peer


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
        ("train --steps", "--steps has no value; give --steps N"),
        ("learn init --force", "DIR is missing; --help tells more"),
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


# `--help` shows the most used options first and the others in groups, and leaves out none.


def kinds_by_line() -> dict[str, type[Any]]:
    """Every command, and every command of a command, by its words."""
    kinds: dict[str, type[Any]] = {}
    for name, kind in COMMANDS.items():
        if "what" in (hints := get_type_hints(kind, include_extras=True)):
            for annotation in get_args(get_args(hints["what"])[0]):
                command, subcommand = get_args(annotation)
                kinds[f"{name} {subcommand.name}"] = command
        else:
            kinds[name] = kind
    return kinds


KINDS = kinds_by_line()


def options_of(kind: type[Any]) -> set[str]:
    """The options of a command, from its fields."""
    options: set[str] = set()
    hints = get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        about = get_args(hints[field.name])[1:]
        if is_dataclass(field.default):
            options |= options_of(type(field.default))
        elif tyro.conf.Positional not in about and tyro.conf.Suppress not in about:
            options.add(f"--{field.name.replace('_', '-')}")
    return options


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
    assert shown == [group for group in help_tables()["groups"] if group in shown]
    assert bool(shown) == (len(lines) > ONE_LIST)
    if shown:
        used = [f"--{name.replace('_', '-')}" for name in most_used(line).split()]
        assert lines[: len(used)] == used
        assert len(used) <= 10
        first = text.split(f" {shown[0]} options")[0]
        assert listed(first) == used, "an option has no group"


def most_used(line: str) -> str:
    """Names of the options that the help of a command shows first."""
    table = help_tables()["most_used"]
    return table[line] if line in table else table[line.split()[-1]]


def test_every_group_is_shown_by_train(capsys: Captured) -> None:
    assert titles(help_of("train", capsys)) == list(help_tables()["groups"])


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
        paragraphs = [" ".join(paragraph.split()) for paragraph in (kind.__doc__ or "").split("\n\n")]
        assert f"• {name} {paragraphs[0]}" in shown
        assert all(paragraph not in shown for paragraph in paragraphs[1:] if paragraph)


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
    assert any(field.default is MISSING for field in fields(KINDS["data prepare"]))
    assert "--out FOLDER" in help_of("data prepare", capsys)
    assert "(required)" in help_of("data prepare", capsys)


# Whatever is wrong with a request: a sentence on stderr, nothing on stdout, nothing written, and the right status.


USER = """
def gradients(rank):
    for l in rank.layers:
        rank.weights[l], rank.opt_states[l] = rank.load_weights(l)
    rank.activations[0] = rank.load_batch(rank.share())
    for l in rank.layers:
        rank.activations[l + 1] = rank.forward(l, rank.activations[l], rank.weights[l])
    grad = rank.loss(rank.activations.pop(len(rank.layers)))
    for l in reversed(rank.layers):
        grad_weight, grad = rank.backward(l, rank.activations.pop(l), grad, rank.weights[l])
        yield l, grad_weight


async def right(rank):
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        rank.weights[l], rank.opt_states[l] = rank.update(l, total, rank.weights[l], rank.opt_states[l])


def plain(rank):
    pass


async def two(rank, more):
    pass


def divide():
    return 1 / 0  # divides


async def raises(rank):
    rank.load_batch([0])
    if rank.index == 2:
        divide()


async def forgets_the_update(rank):
    rank.weights[0], rank.opt_states[0] = rank.load_weights(0)  # loads


async def waits_in_a_circle(rank):
    await rank.recv(source=(rank.index + 1) % rank.world)  # receives


async def reduces_twice(rank):
    for l, grad_weight in gradients(rank):
        total = await rank.all_reduce(grad_weight)
        total = await rank.all_reduce(total)  # again


async def sends_too_much(rank):
    await right(rank)
    if rank.index == 0:
        rank.send(rank.load_batch([0]), to=1)  # surplus


async def swaps_two_sends(rank):
    if rank.index == 0:
        for m in (1, 0):
            rank.send(rank.load_batch([m]), to=1)
    if rank.index == 1:
        for m in (0, 1):
            await rank.recv(source=0, expect=("activations", 0, m))  # swapped


async def does_nothing(rank):  # empty
    pass


async def sleeps(rank):
    import asyncio

    await asyncio.sleep(1)  # asleep
"""


def line_of(mark: str) -> int:
    """The line of the user's file that carries a comment."""
    return next(number for number, line in enumerate(USER.splitlines(), 1) if line.endswith(f"# {mark}"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a user's file in it, as the current one."""
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(capsys: Captured, *arguments: str) -> tuple[int, str]:
    """The status and what stands on stderr; stdout stays empty."""
    status = main(list(arguments))
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "Traceback" not in captured.err
    assert captured.err.endswith("\n")
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("simulate fdsp", "there is no strategy 'fdsp'; did you mean fsdp?"),
        (
            "simulate qqq",
            "there are single, grad-accum, ddp, wsdp, fsdp, column-parallel, tensor-parallel, expert-parallel",
        ),
        ("simulate none.py:right", "none.py is not a file"),
        ("simulate folder.py:right", "folder.py is not a file"),
        ("simulate user.py:rigth", "user.py has no function 'rigth'; did you mean right?"),
        ("simulate user.py", "say which function of user.py: user.py:NAME"),
        ("simulate user.py:", "say which function of user.py: user.py:NAME"),
        ("simulate user.py:plain", "plain in user.py is not a strategy; write it as `async def plain(rank): ...` or"),
        ("simulate user.py:two", "two cannot be called with the rank alone"),
        ("simulate fsdp --ranks 3", "4 microbatches do not divide among 3 ranks; give a multiple of 3 microbatches"),
        ("simulate gpipe --layers 3", "3 layers do not reach 4 pipeline stages; give at most 3 stages, or more layers"),
        ("simulate user.py:right --microbatches 6", "6 microbatches do not divide among 4 ranks"),
        ("simulate single --ranks 2", "one device, but 2 ranks were asked for; give 1"),
        (
            "simulate",
            "no strategy is given; give a name (shardlab strategies lists them), --plan FILE, or flags such as",
        ),
        ("simulate fsdp --pp 2", "fsdp is a program, which flags cannot change; leave out the name, or"),
        ("simulate user.py:right --recompute full", "user.py:right is a program, which flags cannot change"),
        ("simulate zb-h1 --plan plan.toml", "both zb-h1 and --plan plan.toml were given; give one of them"),
        ("simulate --plan plan.toml", "plan.toml cannot be read: No such file or directory"),
        ("simulate --plan user.py", "user.py is not TOML: "),
        ("simulate zb-h1 --pp 8 --ranks 4", "the plan's mesh pp 8 does not fit on 4 ranks; leave out --ranks"),
        ("simulate hsdp --dp-replicate 2", "dp_shard is left out; give every axis, such as --dp-repl"),
        ("simulate --pp 2 --schedule 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("simulate --pp 2 --schedule qqqqq", "there are gpipe, 1f1b, interleaved-1f1b, breadth-first, zb-h1, zb-h2"),
        ("simulate --pp 2 --schedule none.csv", "none.csv cannot be read as a pipeline CSV: No such file"),
        ("simulate --pp 2 --schedule none.py:mine", "none.py is not a file"),
        ("simulate --pp 2 --schedule user.py:right", "right in user.py is not a schedule; write it as a generator of"),
        ("simulate --pp 2 --schedule user.py:rigth", "user.py has no function 'rigth'; its generators are: gradients"),
        ("simulate zb-v --pp 2 --stages-per-rank 3", "zb-v has 2 stages on each rank, but stages_per_rank is 3"),
        ("simulate --layers-per-stage 3 9", "are to be cut into 1 stage; give 1 number of 1 or more that add up to 12"),
        ("simulate --pp 2 --layers-per-stage 1 2 3", "layers_per_stage is 1, 2, 3, but 6 layers are to be cut into 2"),
        ("simulate --pp 2 --layers-per-stage 3 -1", "give 2 numbers of 1 or more that add up to 2"),
        ("simulate --dp-shard 2 --shard-parameters dp_shard", "let shard_optimizer begin with dp_shard"),
        ("simulate --dp-shard 2 --shard-optimizer pp", "shard_optimizer is pp; give some of dp_shard, dp_replicate"),
        (
            "simulate --dp-shard 2 --reduce-every-microbatch tp",
            "reduce_every_microbatch is tp; give some of dp_shard, dp_replicate",
        ),
        ("simulate --dp-shard 3", "4 microbatches do not divide among 3 data-parallel ranks; give a multiple of 3"),
        ("simulate hsdp --ranks 3", "3 ranks do not make two replicas; give an even number, or a mesh by"),
        ("schedule 1f2b", "there is no schedule '1f2b'; did you mean 1f1b?"),
        ("schedule zb-v --stages-per-rank 1", "zb-v has 2 stages on each rank, but stages_per_rank is 1"),
        ("schedule 1f1b --csv missing/a.csv", "--csv missing/a.csv: the folder missing does not exist"),
        ("schedule 1f1b --csv folder.py", "--csv folder.py: this is a folder; give a file in it, such as"),
        ("verify --all ddp", "verify --all uses its own strategies and sizes; give only --steps, --passes"),
        ("verify --all --pp 2", "verify --all uses its own strategies and sizes; give only --steps, --passes"),
        ("verify --pp 2 --ranks 3", "the plan's mesh pp 2 does not fit on 3 ranks"),
        ("train --strategy ddp --pp 2", "ddp is a program, which flags cannot change"),
        ("simulate fsdp --svg missing/fsdp.svg", "--svg missing/fsdp.svg: the folder missing does not exist"),
        ("simulate fsdp --svg folder.py", "--svg folder.py: this is a folder"),
    ],
)
def test_a_request_that_cannot_be_met_is_one_sentence_and_exits_with_2(
    arguments: str, sentence: str, folder: Path, capsys: Captured
) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert err.startswith("shardlab: ")
    assert sentence in err
    assert err.count("\n") == 1
    assert sorted(path.name for path in folder.iterdir()) == ["folder.py", "user.py"]


@pytest.mark.parametrize("option", ["--model", "--cluster", "--recipe", "--memory", "--precision", "--svg", "--config"])
def test_an_option_with_an_empty_value_is_not_one_that_is_left_out(option: str, capsys: Captured) -> None:
    sentence = f"shardlab: {option} is empty; give a value, or leave it out\n"
    assert refused(capsys, "simulate", "zero-1", option, "") == (2, sentence)
    assert refused(capsys, "simulate", "zero-1", f"{option}=") == (2, sentence)


@pytest.mark.parametrize("option", ["--ranks", "--layers", "--microbatches"])
@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ("four", "'four' is not a whole number; give 1 or more"),
        ("1.5", "'1.5' is not a whole number; give 1 or more"),
    ],
)
def test_counts_are_whole(option: str, value: str, sentence: str, capsys: Captured) -> None:
    status, err = refused(capsys, "simulate", "pipeline-fsdp", option, value)
    assert status == 2
    assert err == f"shardlab: {option}: {sentence}\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("simulate pipeline-fsdp --ranks 0", "--ranks: 0 is too few; give 1 or more"),
        ("simulate pipeline-fsdp --layers -4", "--layers: -4 is too few"),
        ("simulate zero-3 --model gpt2 --cluster h100x8 --micro-batch-size -1", "--micro-batch-size: -1 is too few"),
        ("simulate --dp-replicate 0", "--dp-replicate: 0 is too few"),
        ("train --kv-heads 0", "--kv-heads: 0 is too few"),
        ("schedule 1f1b --pp 0", "--pp: 0 is too few"),
        ("bench collectives --factor 0", "--factor: 0 is too few"),
        ("collectives show all --ranks 0", "--ranks: 0 is too few"),
    ],
)
def test_counts_are_at_least_one_which_one_sentence_says(arguments: str, sentence: str, capsys: Captured) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert err.startswith(f"shardlab: {sentence}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("simulate fsdp --rankz 4", "there is no option --rankz; did you mean --ranks?"),
        (f"train --strategy ddp --data {'x' * 300}", "is too long for the name of a file; give the path of a file"),
        ("simulate fsdp --svg a/out.png", "--svg a/out.png: a drawing is an SVG file; give a/out.svg"),
        ("devices", "there is no command 'devices'; did you mean clusters?"),
        ("simulate --strategy fsdp", "there is no option --strategy; give its value alone"),
        ("doctor --foo", "there is no option --foo; --help lists them"),
        ("simulate fsdp ddp", "unexpected argument 'ddp'"),
        ("simulat fsdp", "there is no command 'simulat'; did you mean simulate?"),
        ("", "no command is given; there are strategies, simulate, view"),
        ("train --optimizer admw", "--optimizer is 'admw'; did you mean adamw?"),
        ("train --precision int8", "--precision is 'int8'; there are bf16, bf16-fp32-grads, bf16-params"),
        ("train --steps", "--steps has no value; give --steps N"),
        ("convert", "missing from shardlab convert: FROM, TO; --help tells more"),
        ("sample run --top-p much", "--top-p: 'much' does not fit; give --top-p FLOAT"),
        ("sample run --seed much", "--seed: 'much' does not fit; give --seed INT"),
        ("simulate --pp 2 --reshard-after never", "--reshard-after is 'never'"),
        ("simulate --pp 2 --recompute half", "half"),
        ("simulate --pp two", "'two' is not a whole number; give 1 or more"),
        ("schedule", "SCHEDULE"),
        ("schedule 1f1b --form csv", "compute_only"),
        ("strategies --svg x", "--svg"),
        ("simulate fsdp --svg", "--svg"),
    ],
)
def test_a_wrong_option_exits_with_2(arguments: str, words: str, capsys: Captured) -> None:
    status, err = refused(capsys, *arguments.split())
    assert status == 2
    assert words in err
    assert err.startswith("shardlab: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("raises", "user.py:<divides>: rank 2, op 1: the program raised ZeroDivisionError: division by zero"),
        ("forgets_the_update", "user.py:<loads>: rank 0, op 0 load_weight(layer 0): weights[0] is loaded here"),
        ("reduces_twice", "user.py:<again>: rank "),
        ("reduces_twice", "microbatches 0-3 would be counted twice"),
        ("sends_too_much", "user.py:<surplus>: rank 0, op "),
        ("sends_too_much", "no receive on rank 1 takes this message"),
        (
            "swaps_two_sends",
            "user.py:<swapped>: rank 1, op 0 recv from rank 0: expected activations[0] of microbatch 0",
        ),
        ("does_nothing", "user.py:<empty>: weights[0]: no rank loads this weight, so no"),
        ("sleeps", "user.py:<asleep>: rank 0, op 0: the program awaited something else"),
    ],
)
def test_a_refused_program_names_the_line_at_fault_and_exits_with_1(
    function: str, sentence: str, folder: Path, capsys: Captured
) -> None:
    status, err = refused(capsys, "simulate", f"user.py:{function}")
    assert status == 1
    assert re.sub("<(.*?)>", lambda mark: str(line_of(mark[1])), sentence) in err
    assert err.count("\n") == 1


def test_json_has_the_fields_of_a_refusal(folder: Path, capsys: Captured) -> None:
    assert main(["simulate", "user.py:reduces_twice", "--json"]) == 1
    captured = capsys.readouterr()
    output = json.loads(captured.out)["refused"]
    assert captured.err == f"shardlab: {output['text']}\n"
    assert (output["layer"], output["doubled"], output["line"]) == (3, [0, 1, 2, 3], f"user.py:{line_of('again')}")


def test_a_deadlock_names_the_whole_cycle_and_the_lines_where_ranks_wait(folder: Path, capsys: Captured) -> None:
    status, err = refused(capsys, "simulate", "user.py:waits_in_a_circle", "--ranks", "3")
    assert status == 1
    for rank in range(3):
        assert f"rank {rank} waits in recv from rank {(rank + 1) % 3}" in err
    assert f"\n  ranks 0-2 wait at user.py:{line_of('receives')}\n" in err


def test_a_refused_program_draws_nothing(folder: Path, capsys: Captured) -> None:
    assert refused(capsys, "simulate", "user.py:reduces_twice", "--svg", "picture.svg")[0] == 1
    assert not (folder / "picture.svg").exists()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("x = 1\n1 / 0\n", "bad.py:2 cannot be run: ZeroDivisionError: division by zero"),
        ("async def right(rank)\n", "bad.py:1 cannot be run: SyntaxError"),
        ("import no_such_module_anywhere\n", "bad.py:1 cannot be run: ModuleNotFoundError"),
    ],
)
def test_a_file_that_cannot_be_run_is_refused(text: str, sentence: str, folder: Path, capsys: Captured) -> None:
    Path("bad.py").write_text(text)
    status, err = refused(capsys, "simulate", "bad.py:right")
    assert status == 2
    assert sentence in err


# `Report`: one list of facts and tables, of which the console and --json are two renderings.


def test_a_report_is_the_same_on_the_console_and_in_json(capsys: Captured) -> None:
    report = Report(name="step")
    report.fact("time", "of a step", "12", seconds=12)
    report.fact("memory", "of a rank", "3", bytes=3)
    report.fact("check", "passed", checked=True)
    report.line("rows", wrap=False)
    rows = [{"rank": 0, "bytes": 3}, {"rank": 1, "bytes": 2}]
    report.table({"rank": lambda row: str(row["rank"]), "bytes": lambda row: f"{row['bytes']} B"}, rows, "ranks")
    report.show(json=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["time", "12", "of", "a", "step"],
        ["memory", "3", "of", "a", "rank"],
        ["check", "passed"],
        ["rows"],
        ["rank", "bytes"],
        ["0", "3", "B"],
        ["1", "2", "B"],
    ]
    report.show(json=True)
    expected = {"name": "step", "seconds": 12, "bytes": 3, "checked": True, "ranks": rows}
    assert json.loads(capsys.readouterr().out) == expected


def test_figures_of_a_report_are_aligned_up_to_the_next_fact_without_one(capsys: Captured) -> None:
    report = Report()
    report.fact("short", "a", "1")
    report.fact("long", "b", "1,000")
    report.fact("no figure", "c")
    report.fact("other", "d", "10")
    report.show(json=False)
    assert capsys.readouterr().out.splitlines() == [
        "short               1  a",
        "long            1,000  b",
        "no figure       c",
        "other           10  d",
    ]
