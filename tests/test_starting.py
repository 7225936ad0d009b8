"""The line that a terminal shows while the command is being loaded, and the status of an interrupted command."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import pytest

from shardlab import starting
from tests.support.processes import started
from tests.test_readme import ROOT


def test_a_terminal_shows_that_the_command_is_loaded_until_it_is(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    notice = threading.Timer(0.0, starting.show_notice)
    monkeypatch.setattr(starting, "_notice", notice)
    monkeypatch.setattr(os, "isatty", lambda _: True)  # pyright: ignore
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    monkeypatch.setattr(sys, "argv", ["shardlab"])
    monkeypatch.delitem(sys.modules, "multiprocessing.spawn", raising=False)
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.default_int_handler)  # pyright: ignore
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # pyright: ignore
    starting.leave_when_interrupted()
    notice.join()
    starting.finish_loading()
    assert capfd.readouterr().err == "shardlab: loading\r\x1b[2K"
    starting.finish_loading()
    assert capfd.readouterr().err == "", "a second command of this process has no line to erase"


INTERRUPTED_IN_EXEC = """
import runpy, shardlab.cli
try:
    exec("raise KeyboardInterrupt")
except KeyboardInterrupt:
    pass
runpy.run_module("shardlab", run_name="__main__")
"""
"""Module in which Python marks the process as ended by SIGINT, as Ctrl-C in the definition of a dataclass does."""


def test_an_interrupt_while_a_dataclass_is_defined_keeps_the_status_of_the_command(tmp_path: Path) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_IN_EXEC)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src")))}
    with started([sys.executable, "-m", "interrupted", "--version"], env=environment) as process:
        output, _ = process.communicate()
    assert (process.returncode, output.split()[0]) == (0, "shardlab")


INTERRUPTED_AT_THE_END = """
import atexit, runpy, signal, sys
sys.argv = ["shardlab", "strategies"]
interrupt = lambda: atexit.register(signal.raise_signal, signal.SIGINT)
{first}
{second}
runpy.run_module("shardlab", run_name="__main__", alter_sys=True)
"""
"""Module that is interrupted while Python ends the process, after the command."""


@pytest.mark.parametrize("order", [("import shardlab", "interrupt()"), ("interrupt()", "import shardlab")])
def test_ctrl_c_after_the_end_of_the_command_keeps_its_status_and_prints_nothing(
    order: tuple[str, str], tmp_path: Path
) -> None:
    """What is registered first is called last at exit, when Python is about to free memory."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED_AT_THE_END.format(first=order[0], second=order[1]))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT / "src")))}
    with started([sys.executable, "-m", "interrupted"], env=environment) as process:
        output, errors = process.communicate()
    assert (process.returncode, "fsdp" in output, errors) == (0, True, "")
