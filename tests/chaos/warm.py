"""Starts of `shardlab train` without their imports, which take seconds and hold nothing of a run.

One process has imported all that a run imports. It forks for each start, and so does the run where it would start the
server that forks its ranks. From there on everything is as it always is.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any

IMPORTED = ("shardlab.cli", "shardlab.cli.ranks", "shardlab.train.loop", "shardlab.train.resume", "torch._dynamo")


class WarmProcess:
    """A run that was started warm, with as much of `subprocess.Popen` as is needed."""

    def __init__(self, answers: int, pid: int) -> None:
        self._answers = answers
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, if it has ended."""
        if self.returncode is None and select.select([self._answers], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self) -> int:
        """Wait for its end."""
        if self.returncode is None:
            self.returncode = _number(self._answers)
        return self.returncode


class WarmStarts:
    """Starts runs warm, one after another.

    Args:
        environment: of all of them.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.chaos.warm"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).parents[2],
        )
        self._last: WarmProcess | None = None

    def start(self, words: Sequence[str], log: Path) -> WarmProcess:
        """Start `shardlab` with these words, in a session of its own."""
        assert self._last is None or self._last.poll() is not None, "one run at a time"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"words": list(words), "log": str(log)}).encode() + b"\n")
        self._process.stdin.flush()
        answers = self._process.stdout.fileno()
        self._last = WarmProcess(answers, _number(answers))
        return self._last

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def _number(answers: int) -> int:
    """The next line, read no further."""
    text = b""
    while not text.endswith(b"\n"):
        if not (more := os.read(answers, 1)):
            raise RuntimeError("what starts runs warm has ended")
        text += more
    return int(text)


def _fork_server(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
    """Start multiprocessing's server by a fork: the code that would be given to a new interpreter runs in this one."""
    code = str(words[-1])
    if "forkserver" not in code:
        return _spawn(path, words, passed)
    if pid := os.fork():
        return pid
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    kept = {0, 1, 2, *passed}
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in kept:
            try:
                os.close(int(name))
            except OSError:  # that of the listing itself
                continue
    try:
        exec(code, {})
    finally:
        os._exit(0)


_spawn = util.spawnv_passfds  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownVariableType]


def _begin(words: Sequence[str], log: str) -> int:
    """Become a run."""
    os.setsid()
    nothing, written = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for given, taken in ((nothing, 0), (written, 1), (written, 2)):
        os.dup2(given, taken)
    os.close(nothing)
    os.close(written)
    sys.argv = ["shardlab", *words]
    util.spawnv_passfds = _fork_server  # pyright: ignore[reportAttributeAccessIssue]
    from shardlab.cli import main

    return main()


def _serve() -> int:
    for name in IMPORTED:
        __import__(name)
    while line := sys.stdin.readline():
        if not (pid := os.fork()):
            return _begin(**json.loads(line))
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_serve())
