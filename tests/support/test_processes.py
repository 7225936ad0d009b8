"""Processes that tests start."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from pathlib import Path

import pytest

from tests.support.processes import MARK, left_processes, started, stop_ignoring_signals


def ignored_signals() -> set[int]:
    """The signals that a new program ignores."""
    text = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
    bits = int(text.split("SigIgn:")[1].split()[0], 16)
    return {number for number in range(1, 32) if bits >> number - 1 & 1}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_processes_of_tests_ignore_neither_ctrl_c_nor_the_end_of_the_terminal() -> None:
    signals = signal.SIGINT, signal.SIGHUP
    handlers = [signal.signal(number, signal.SIG_IGN) for number in signals]
    try:
        assert ignored_signals() >= set(signals)
        stop_ignoring_signals()
        assert not ignored_signals() & set(signals)
        signal.raise_signal(signal.SIGHUP)  # this process outlives it, as after nohup
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip(signals, handlers, strict=True):
            signal.signal(number, handler)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_a_process_that_outlives_its_parent_is_found_with_its_test() -> None:
    mark = f"/{uuid.uuid4()}"
    variables = {**os.environ, MARK: f"{mark}/1"}
    script = "sleep 1000 >/dev/null 2>&1 & echo $!"
    shell = subprocess.run(["sh", "-c", script], env=variables, capture_output=True, text=True, check=True)
    try:
        (child,) = left_processes(mark, patience=0)
        assert child.pid == int(shell.stdout)
        assert str(child) == f"{os.environ['PYTEST_CURRENT_TEST'].split(' (')[0]} left process {child.pid}: sleep 1000"
    finally:
        os.kill(int(shell.stdout), signal.SIGKILL)
    assert not left_processes(mark, patience=60)


def test_a_process_ends_with_the_block_that_started_it_and_so_does_what_it_started() -> None:
    mark = f"/{uuid.uuid4()}"
    with (
        pytest.raises(subprocess.TimeoutExpired),
        started(["sh", "-c", "sleep 1000 & wait"], env={**os.environ, MARK: mark}) as process,
    ):
        process.communicate(timeout=0.01)
    assert not left_processes(mark, patience=60)
