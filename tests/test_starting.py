"""The line that a terminal shows while the command is being loaded."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from shardlab import starting


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
    starting.loaded()
    assert capfd.readouterr().err == "shardlab: loading\r\x1b[2K"
    starting.loaded()
    assert capfd.readouterr().err == "", "a second command of this process has no line to erase"
