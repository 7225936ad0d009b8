"""Server that forks programs with their imports done: `python -m tests.support.warm_server SOCKET`.

It has imported all modules of training. It forks for each start, and the fork becomes the program, with its own
arguments, variables, folder and files. It also forks the interpreters that the program would start: the server that
forks its ranks, ranks of torchrun, and processes of a script. After that, everything runs as usual.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

from tests.support.warm import LONGEST, WarmProcess

IMPORTED = (
    "shardlab.cli",
    "shardlab.cli.train.before_ranks",
    "shardlab.train.loop",
    "shardlab.train.checkpoints",
    "torch._dynamo",
    "torch.distributed.run",
    "tests.support.short_runs",
)
TORCHRUNS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""Module in which torchrun starts its ranks."""


def _fork_server(path: Any, words: Sequence[Any], passed: Sequence[int]) -> int:
    """Start multiprocessing's server by a fork, which runs the code meant for a new interpreter."""
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


def _attend(connection: socket.socket) -> None:
    """Fork a program, and send its process number and exit code; if the client has ended, the program has no parent."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    text, files, _, _ = socket.recv_fds(connection, LONGEST, 3)
    if not (pid := os.fork()):
        connection.close()
        return _become(files=files, **json.loads(text))
    for file in files:
        os.close(file)
    connection.send(str(pid).encode())
    ended = os.pidfd_open(pid)
    if ended in select.select([ended, connection], [], [])[0]:
        with suppress(BrokenPipeError):
            connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _become(
    words: Sequence[str], variables: Mapping[str, str], folder: str, new_session: bool, files: Sequence[int]
) -> None:
    """Run a program in this process until it ends."""
    if new_session:
        os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    util.spawnv_passfds = _fork_server  # pyright: ignore[reportAttributeAccessIssue]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True, line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        words = words[1:]
    how, *rest = words
    if how == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0], subprocess.Popen = list(words), str(Path(how).parent), WarmProcess
        runpy.run_path(how, run_name="__main__")


def _end(status: object) -> None:
    """End this process as `sys.exit(status)` does, without freeing its modules: that would copy the server's memory."""
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF if isinstance(status, int) else 0)


def _serve(address: str) -> None:
    """Fork for each request, until the process that started this server has ended."""
    for name in IMPORTED:
        import_module(name)
    gc.freeze()  # a collection in a fork would copy all memory that was there before
    WarmProcess.address = address
    setattr(import_module(TORCHRUNS), "Popen", WarmProcess)  # noqa: B010
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(address)
        listening.listen()
        print("ready", flush=True)
        while sys.stdin not in select.select([listening, sys.stdin], [], [])[0]:
            connection, _ = listening.accept()
            if not os.fork():
                listening.close()
                try:
                    _attend(connection)
                except SystemExit as end:
                    if isinstance(end.code, str):
                        raise
                    _end(end.code)
                _end(0)
            connection.close()


if __name__ == "__main__":
    _serve(sys.argv[1])
