"""Programs that never end, sizes of a few digits that ask for more than memory, and deep files: a sentence at once."""

# pyright: reportUnknownMemberType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from shardlab.check import Checked, report
from shardlab.cli import main, plan_options
from shardlab.cli.options import check_new_file
from shardlab.language import Program, Refused, UserError
from shardlab.measure.plot import save_figure
from tests.support.processes import PATIENCE, started, until
from tests.support.thorough import sampled
from tests.support.warm import WarmStarts
from tests.test_readme import ROOT

BILLION = "1000000000"

PROGRAMS = """
from itertools import count

from shardlab.strategies.schedules import Forward


async def asks(rank):
    converged = False
    while not converged:
        await rank.barrier()


async def alone(rank):
    while True:
        rank.activations[0] = rank.load_batch([0])


async def keeps(rank):
    for i in count():
        rank.activations[i] = rank.load_batch([0])


def endless(rank, ranks, microbatches, stages_per_rank):
    for i in count():
        yield Forward(rank, 0)


def search():
    while True:
        pass


async def spins(rank):
    rank.activations[0] = rank.load_batch([0])
    search()


async def catches_all(rank):
    while True:
        try:
            search()
        except BaseException:
            pass


async def awaits(rank):
    done = rank.barrier()
    while True:
        await done


def stuck(rank, ranks, microbatches, stages_per_rank):
    yield Forward(rank, 0)
    search()
"""


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("user.py").write_text(PROGRAMS)
    Path("huge.toml").write_text(f'model = "llama3-8b"\nlayers = {BILLION}\n')
    Path("deep.toml").write_text("a = " + "[" * 3000 + "]" * 3000)
    Path("dots.toml").write_text("mesh." + ".".join("a" * 3000) + " = 1")
    Path("deep.json").write_text('{"version": ' + "[" * 3000 + "]" * 3000 + "}")
    Path("measured.jsonl").write_text("[" * 3000 + "]" * 3000)
    return tmp_path


def refused(command: str, capsys: pytest.CaptureFixture[str], status: int) -> str:
    assert main(command.split()) == status
    said = capsys.readouterr().err
    assert said.startswith("shardlab: ")
    assert said.count("\n") == 1
    assert len(said) < 500
    return said


@pytest.mark.parametrize(
    ("name", "line", "code"), [("asks", 10, "barrier"), ("alone", 15, "load_batch"), ("keeps", 20, "load_batch")]
)
def test_a_program_that_never_ends_is_refused_at_the_line_that_repeats(
    name: str, line: int, code: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert code in PROGRAMS.splitlines()[line - 1]
    said = refused(f"simulate user.py:{name} --max-ops 20000", capsys, 1)
    assert f"user.py:{line}: rank " in said
    assert "the step has more than 20,000 ops here" in said


def test_a_schedule_that_never_ends_is_refused_at_the_line_that_repeats(
    user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "yield" in PROGRAMS.splitlines()[25 - 1]
    for command in ("schedule user.py:endless", "simulate --pp 2 --schedule user.py:endless"):
        assert "rank 0, line 25, goes on after 12 actions" in refused(command, capsys, 2)


@pytest.mark.parametrize("command", ["simulate ", "verify ", "train --strategy "])
def test_a_program_that_loops_without_an_op_is_refused_at_its_innermost_line(
    command: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "while True" in PROGRAMS.splitlines()[29 - 1]
    said = refused(f"{command}user.py:spins --max-seconds-per-op 0.2", capsys, 1)
    assert said.startswith(("shardlab: user.py:29: rank 0, op 1 ", "shardlab: user.py:30: rank 0, op 1 "))
    assert "has not come within 0.2 s of CPU time; let the loop end, or raise --max-seconds-per-op" in said


def test_a_loop_that_awaits_what_is_done_is_refused_too(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("simulate user.py:awaits --max-seconds-per-op 0.2", capsys, 1)
    assert "rank 3, op " in said
    assert "has not come within 0.2 s" in said


def test_a_loop_that_catches_all_is_refused_too(user: Path, warm: WarmStarts) -> None:
    """In a process of its own: nothing ends the loop but the end of its process, and here it would go on for ever."""
    words = ["-m", "shardlab", "simulate", "user.py:catches_all", "--max-seconds-per-op", "0.2"]
    done = warm.run(words, cwd=user)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "rank 0, op 0" in done.stderr
    assert "has not come within 0.2 s" in done.stderr


def test_a_schedule_that_loops_without_an_action_is_refused(user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused("schedule user.py:stuck --max-seconds-per-op 0.2", capsys, 2)
    assert ": action 1 of rank 0 has not come within 0.2 s of CPU time" in said
    refused("simulate --pp 2 --schedule user.py:stuck --max-seconds-per-op 0.2", capsys, 1)


def test_no_time_at_all_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give more than 0" in refused("simulate ddp --max-seconds-per-op 0", capsys, 2)


@pytest.mark.parametrize(
    ("command", "ops"),
    [
        (f"simulate fsdp --microbatches {BILLION}", "1,000,000,000"),
        (f"simulate gpipe --microbatches {BILLION}", "8,000,000,012"),
        (f"simulate fsdp --layers {BILLION}", "4,000,000,000"),
        (f"simulate gpipe --layers {BILLION}", "10,000,000,004"),
        (f"simulate fsdp --ranks {BILLION}", "1,000,000,000"),
        (f"simulate --pp {BILLION}", "2,000,000,000"),
        (f"simulate --tp {BILLION}", "40,000,000,001"),
        (f"schedule gpipe --microbatches {BILLION}", "8,000,000,000"),
        (f"schedule gpipe --pp {BILLION}", "2,000,000,000"),
        (f"schedule interleaved-1f1b --stages-per-rank {BILLION}", "8,000,000,000"),
        ("simulate zero-3 --model llama3-8b --cluster h100x16 --microbatches 1600000000", "6,400,000,065"),
        ("simulate ddp --model llama3-8b --cluster h100x16 --microbatches 1600000000", "1,600,000,000"),
        (f"simulate zero-3 --model llama3-8b --cluster h100x16 --layers {BILLION}", "4,000,000,001"),
        (f"simulate ddp --model llama3-8b --cluster h100x16 --layers {BILLION}", "4,000,000,000"),
        ("simulate zero-3 --model huge.toml --cluster h100x16", "4,000,000,001"),
        (f"verify fsdp --microbatches {BILLION}", "1,000,000,000"),
        (f"train --layers {BILLION}", "4,000,000,000"),
    ],
)
def test_sizes_that_no_machine_holds_are_refused_with_the_ops_that_they_need(
    command: str, ops: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.process_time()
    said = refused(command, capsys, 2)
    assert f"come to {ops} ops or more, and at most " in said
    assert "--max-ops" in said
    assert time.process_time() - started < 30


def test_max_ops_lets_a_step_have_more_ops_and_fewer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "gpipe", "--max-ops", "100"]) == 1
    assert "the step has more than 100 ops here" in capsys.readouterr().err
    assert main(["simulate", "gpipe", "--microbatches", "64", "--layers", "512", "--max-ops", "60000"]) == 2
    assert main(["simulate", "gpipe", "--microbatches", "8", "--max-ops", "60000"]) == 0


@pytest.mark.parametrize(
    "command",
    [
        "simulate --plan deep.toml",
        "simulate --plan dots.toml",
        "simulate zero-3 --model deep.toml --cluster h100x16",
        "simulate zero-3 --model dots.toml --cluster h100x16",
        "simulate zero-3 --model gpt2 --cluster deep.toml",
        "simulate zero-3 --model gpt2 --cluster deep.json",
        "validate deep.json",
        "compare .",
    ],
)
def test_a_file_nested_3000_deep_is_refused(command: str, user: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "it is nested more than 50 levels deep" in refused(command, capsys, 2)


@pytest.mark.parametrize(
    "command",
    sampled(
        [
            "simulate user.py:asks --max-ops 1000000000",
            "simulate gpipe --microbatches 100000 --max-ops 1000000000",
            "schedule gpipe --pp 16 --microbatches 10000000 --max-ops 1000000000",
            "simulate gpipe --model llama3-405b --cluster h100x16 --microbatches 100000 --max-ops 1000000000",
        ],
        lambda command: "user.py" in command or "llama3" in command,
    ),
)
@pytest.mark.parametrize("after", sampled([0.1, 1.0, 1.5], lambda after: after == 1.0))
def test_ctrl_c_prints_one_line(command: str, after: float, user: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    words = ["bash", "-c", 'ulimit -v 6000000; exec "$@"', "-", sys.executable, "-m", "shardlab", *command.split()]
    with started(words, env=environment) as process:
        until(lambda: has_started(process.pid))
        time.sleep(after)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said) == (130, "shardlab: interrupted\n")


def has_started(pid: int) -> bool:
    """Whether a process handles SIGINT as the command does: asyncio is loaded after that."""
    return "_asyncio" in Path(f"/proc/{pid}/maps").read_text()


# Files that commands write: what Shardlab wrote may be written again, what others wrote only by force.


WRITES = [
    ("simulate ddp --svg", "new.svg"),
    ("simulate ddp --trace", "new.json"),
    ("simulate ddp --model gpt2 --cluster h100x4 --svg", "new.svg"),
    ("simulate ddp --model gpt2 --cluster h100x4 --trace", "new.json"),
    ("schedule 1f1b --csv", "new.csv"),
    ("plan --model gpt2 --cluster h100x2 --layers 2 --tp 1 --pp 1 --recompute none --out", "new.toml"),
]


@pytest.mark.parametrize(("command", "name"), WRITES)
def test_a_file_of_the_user_is_replaced_by_force_alone_and_one_of_shardlab_without(
    command: str, name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / name
    path.write_text("years of work\n")
    assert main([*command.split(), str(path)]) == 2
    said = capsys.readouterr().err
    assert f"{path}: this file exists and is not" in said
    assert said.count("\n") == 1
    assert path.read_text() == "years of work\n"
    assert main([*command.split(), str(path), "--force"]) == 0
    assert path.read_text() != "years of work\n"
    assert main([*command.split(), str(path)]) == 0


def test_an_empty_file_is_written_into(tmp_path: Path) -> None:
    path = tmp_path / "new.svg"
    path.touch()
    assert main(["simulate", "ddp", "--svg", str(path)]) == 0


def test_a_schedule_that_was_changed_by_hand_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "new.csv"
    assert main(["schedule", "1f1b", "--csv", str(path)]) == 0
    assert main(["schedule", "gpipe", "--csv", str(path)]) == 2


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_a_plot_of_a_bench_is_known_as_shardlabs_and_another_one_is_not(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plot.{suffix}"
    Figure().savefig(path)
    with pytest.raises(UserError, match="this file exists and is not one of Shardlab's"):
        check_new_file("--plot", path, "compute.svg")
    save_figure(Figure(), path)
    check_new_file("--plot", path, "compute.svg")


def test_force_without_anything_to_replace_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "ddp", "--force"]) == 2
    assert "leave it out" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["new.svg", "new.json"])
def test_pictures_bear_shardlabs_mark_however_long_they_are(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    option = "--svg" if name.endswith("svg") else "--trace"
    for strategy, layers in itertools.product(["ddp", "gpipe"], ["4", "16"]):
        assert main(["simulate", strategy, "--layers", layers, option, str(path)]) == 0


# Every command that takes a strategy checks the tapes of all its ranks, none folded, before anything else is done.


PLAN = ("--pp", "2", "--dp-shard", "2", "--tp", "2", "--shard-optimizer", "dp_shard")
OWN = ("examples/my_strategy.py:my_ddp", "--ranks", "8")
PRICED = ("--model", "gpt2", "--cluster", "h100x8", "--layers", "4")


@pytest.mark.parametrize("arguments", [PLAN, OWN, ("zero-3", "--ranks", "8")], ids=" ".join)
@pytest.mark.parametrize(
    "command", [("simulate",), ("simulate", *PRICED), ("verify",), ("train", "--steps", "1")], ids=" ".join
)
def test_all_ranks_are_checked(
    command: tuple[str, ...],
    arguments: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(program: Program) -> Checked:
        raise Refused("not loaded", "", f"the tapes of {program.ranks} ranks were checked", "load them")

    monkeypatch.setattr(plan_options, "check", refuse)
    monkeypatch.setattr(report, "check", refuse)
    name = [] if arguments is PLAN else ["--strategy", arguments[0]] if command[0] == "train" else [arguments[0]]
    words = arguments if arguments is PLAN else arguments[1:]
    assert main([command[0], *name, *command[1:], *words, "--microbatches", "8"]) == 1
    assert "the tapes of 8 ranks were checked" in capsys.readouterr().err


# What the refusal of a step that does not fit recommends, taken literally.


REFUSED = [
    "context-parallel --model llama3-8b --cluster h100x8",
    "single --model gpt2-xl --cluster h100x1 --micro-batch-size 64",
    "single --model gpt2-xl --cluster v100x8",
    "--pp 8 --schedule gpipe --micro-batch-size 4 --model llama3-8b --cluster a100-40gbx8",
    "--pp 2 --dp-shard 2 --model llama3-8b --cluster h100x16",
    "hsdp --model llama3-70b --cluster h100x64 --micro-batch-size 4",
    "ddp --micro-batch-size 1000000 --model gpt2 --cluster h100x16",
    "ddp --micro-batch-size 48 --model gpt2-xl --cluster h100x4",
    "tensor-parallel --model gpt2-large --micro-batch-size 64 --cluster a100-40gbx2",
    "--tp 8 --dp-replicate 2 --model llama3-70b --cluster h100x64",
    "grad-accum --micro-batch-size 64 --model gpt2-large --cluster h100x1",
]


def followed(command: str, advised: str) -> str:
    """The command with the advice taken: flags are added, a strategy or a plan takes the other's place."""
    advised = advised.replace("a smaller batch, ", "").split(", which uses")[0].rstrip(",")
    words = command.split()
    if advised.startswith(("a plan, ", "grad-accum ")):
        words = words[
            words.index(
                "--model"
                if "--micro-batch-size" not in words
                else min("--model", "--micro-batch-size", key=words.index)
            ) :
        ]
    return " ".join([*words, *advised.removeprefix("a plan, ").split()])


SLOW = ("70b", "context", "gpipe", "gpt2-xl --cluster h100", "1000000")


@pytest.mark.parametrize("command", sampled(REFUSED, lambda command: not any(word in command for word in SLOW)))
def test_what_is_recommended_fits(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *command.split()]) == 2
    said = re.search(r"GiB; (.*) would fit, with ([\d.]+) [GM]iB$", capsys.readouterr().err)
    assert said is not None
    assert main(["simulate", *followed(command, said[1]).split(), "--json"]) == 0, said[1]


def test_where_nothing_fits_idle_devices_are_still_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--ep", "8", "--model", "mixtral-8x7b", "--cluster", "h100x16"]) == 2
    assert "which uses the 8 devices that are idle, takes least" in capsys.readouterr().err
