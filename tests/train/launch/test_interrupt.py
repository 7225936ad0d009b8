"""Signals that ask a run to end, and signals that it was started to ignore."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import sys
import time

import pytest

from shardlab.train.callbacks import TrainingProgress
from shardlab.train.launch.interrupt import SILENCE, Heartbeat, catch_signals, ignore_errors, say
from tests.support.processes import until


def test_a_signal_that_is_ignored_stays_so_and_sigterm_is_heard() -> None:
    ignored = signal.SIGINT, signal.SIGHUP  # as shells start a background job, and as nohup does
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        with catch_signals() as signals:
            for number in (*ignored, signal.SIGTERM):
                signal.raise_signal(number)
            assert signals.recv(64) == bytes([signal.SIGTERM])
            assert [signal.getsignal(number) for number in ignored] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)


# What is written for nobody is dropped, and raises nothing.


def test_a_reader_that_has_gone_is_no_error_now_or_at_the_end() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as file:
        stream = ignore_errors(file)
        print("nobody reads this", file=stream, flush=True)
        print("nor this", file=stream)
        assert not stream.isatty()


@pytest.mark.parametrize("terminal", [False, True])
def test_a_message_is_broken_between_words_in_a_terminal_only(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: terminal)
    message = "shardlab: go on after step 20 with: shardlab train --resume runs/fsdp-1"
    print(message, file=ignore_errors(file))
    lines = ["shardlab: go on after step 20 with:", "shardlab train --resume runs/fsdp-1"]
    assert file.getvalue().splitlines() == (lines if terminal else [message])


def test_the_commands_of_a_live_display_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    file = io.StringIO()
    monkeypatch.setattr(file, "isatty", lambda: True)
    display = "\x1b[2K step 1 loss 2.0 and more"
    ignore_errors(file).write(f"{display}\nwords of a help")
    assert file.getvalue() == f"{display}\nwords of a\nhelp"


# Signs of life.


Captured = pytest.CaptureFixture[str]


def figures(step: int) -> dict[str, float | None]:
    seconds = {"dt": 0.1, "dtf": 0.03, "dtb": 0.06}
    speeds = {"sps": 1, "sps_per_gpu": 1, "tps": 8, "tps_per_gpu": 4, "mfu": None}
    return {"step": step, "loss": 1.0, "learning_rate": 1e-3, "grad_norm": None, **seconds, **speeds}


def test_silence_is_broken_before_ten_seconds_are_over() -> None:
    assert 5 < SILENCE < 10


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the printed lines."""
    said: list[str] = []
    monkeypatch.setattr("shardlab.train.launch.interrupt.say", said.append)
    return said


def until_said(lines: list[str], start: str) -> None:
    until(lambda: any(line.startswith(start) for line in lines), lambda: lines)


def test_a_silence_is_broken_by_what_is_under_way(lines: list[str]) -> None:
    with Heartbeat("validation", silence=0.05) as heartbeat:
        until_said(lines, "validation")
        heartbeat.doing = "step 1"
        until_said(lines, "step 1")
    assert all(re.fullmatch(r"(validation|step 1)  under way for \d+ s", line) for line in lines)
    assert {line.split("  ")[0] for line in lines} == {"validation", "step 1"}


def test_nothing_is_said_while_lines_come_or_after_the_end(capsys: Captured) -> None:
    with Heartbeat("x", silence=60) as heartbeat:
        heartbeat.say("a line")
    assert capsys.readouterr().err == "a line\n"


def test_a_slow_first_step_is_under_way_and_every_slow_step_has_its_line(lines: list[str]) -> None:
    with TrainingProgress(1000, silence=0.05) as progress:
        progress.begin("first step")
        until_said(lines, "first step  under way for")
        for step in range(3):
            progress.show(figures(step))
            until_said(lines, f"step {step + 2:>5}/1000  under way for")
    for step in (1, 2, 3):
        assert any(line.startswith(f"step {step:>5}/1000  loss 1.000") for line in lines)


def test_fast_steps_have_ten_lines(capsys: Captured) -> None:
    with TrainingProgress(100) as progress:
        for step in range(100):
            progress.show(figures(step))
    assert len(capsys.readouterr().err.splitlines()) == 11


def test_signs_of_life_end_when_somebody_else_gives_them(capsys: Captured) -> None:
    with Heartbeat("start", silence=0.01, until=lambda: True):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""


def test_a_log_on_a_full_disk_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(sys, "stderr", Full())
    say("a line")
