"""Programs that never end, sizes of a few digits that ask for more than memory, and deep files: a sentence at once."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from shardlab.cli import main
from tests.support.processes import started
from tests.support.waiting import PATIENCE, until
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
    ("name", "line", "what"), [("asks", 10, "barrier"), ("alone", 15, "load_batch"), ("keeps", 20, "load_batch")]
)
def test_a_program_that_never_ends_is_refused_at_the_line_that_repeats(
    name: str, line: int, what: str, user: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert what in PROGRAMS.splitlines()[line - 1]
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


def test_a_loop_that_catches_all_is_refused_too(user: Path) -> None:
    """In a process of its own: nothing ends the loop but the end of its process, and here it would go on for ever."""
    words = [sys.executable, "-m", "shardlab", "simulate", "user.py:catches_all", "--max-seconds-per-op", "0.2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    with started(words, env=environment) as process:
        _, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, said.count("\n")) == (1, 1)
    assert "rank 0, op 0" in said
    assert "has not come within 0.2 s" in said


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
    [
        "simulate user.py:asks --max-ops 1000000000",
        "simulate gpipe --microbatches 100000 --max-ops 1000000000",
        "schedule gpipe --pp 16 --microbatches 10000000 --max-ops 1000000000",
        "simulate gpipe --model llama3-405b --cluster h100x16 --microbatches 100000 --max-ops 1000000000",
    ],
)
@pytest.mark.parametrize("after", [0.1, 1.5])
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
