"""Signals that ask a run to end, and signals that it was started to ignore."""

from __future__ import annotations

import signal

from shardlab.train.interrupt import caught


def test_a_signal_that_is_ignored_stays_so_and_sigterm_is_heard() -> None:
    ignored = signal.SIGINT, signal.SIGHUP  # as shells start a background job, and as nohup does
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    try:
        with caught() as signals:
            for number in (*ignored, signal.SIGTERM):
                signal.raise_signal(number)
            assert signals.recv(64) == bytes([signal.SIGTERM])
            assert [signal.getsignal(number) for number in ignored] == [signal.SIG_IGN] * 2
    finally:
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
