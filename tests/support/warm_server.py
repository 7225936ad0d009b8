"""Server that forks programs with their imports done: `python -m tests.support.warm_server SOCKET`.

It has imported all modules of training. It forks for each start, and the fork becomes the program, with its own
arguments, variables, folder and files. It also forks the interpreters that the program would start: the server that
forks its ranks, ranks of torchrun, and processes of a script. After that, everything runs as usual.

Pytest has most of these imports after collection, so its own servers are forks of it (`fork_server`,
`fork_forkserver`), which costs milliseconds instead of six seconds of a core each.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import logging
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from multiprocessing import util
from pathlib import Path
from typing import Any

from tests.support.warm import LONGEST, ROOT, WarmProcess, listening_at

IMPORTED = (
    "shardlab.cli",
    "shardlab.cli.train.before_ranks",
    "shardlab.train.loop",
    "shardlab.train.checkpoints",
    "torch._dynamo",
    "torch.distributed.run",
    "tests.support.parsed_lines",
    "tests.support.short_runs",
)
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"
"""Module in which nodes of torchrun meet."""

TORCHRUNS = "torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler"
"""Module in which torchrun starts its ranks."""


def fork_forkserver(path: Any, words: Sequence[Any], pass_fds: Sequence[int]) -> int:
    """Start multiprocessing's server by a fork, which runs the code meant for a new interpreter at its first use."""
    code = str(words[-1])
    if "forkserver" not in code:
        return _spawn(path, words, pass_fds)
    return _fork(pass_fds, lambda: exec(code, {}))


def fork_server(listening: socket.socket, alive: int) -> int:
    """Fork the server off this process, and return its number. It ends when the other end of the pipe `alive` closes.

    It imports what this process has not imported when it is used for the first time.
    """

    def serve() -> None:
        sys.path[:0] = ["", str(ROOT)]  # the first becomes that of a program
        _serve(listening, alive)

    return _fork((listening.fileno(), alive), serve)


def _fork(files: Sequence[int], serve: Callable[[], object]) -> int:
    """Fork a server off this process, and return its number.

    Args:
        files: what the server keeps open: the socket at which it listens, the pipe whose other end closes when it is to
            end, and others.
        serve: what it does once somebody connects.
    """
    if pid := os.fork():
        return pid
    try:
        _become_new(files)
        if files[0] in select.select(files[:2], [], [])[0]:
            serve()
    finally:
        os._exit(0)


def _become_new(kept_files: Collection[int]) -> None:
    """Drop what a new process would not have from its parent: handlers of signals, finalizers, warnings, files."""
    faulthandler.disable()
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    weakref.finalize._registry.clear()  # pyright: ignore
    warnings.resetwarnings()  # they are errors in pytest
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        if int(name) > 2 and int(name) not in kept_files:
            os.dup2(null, int(name))  # closed, its number would be another file's, to which old objects would write
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for reference in logging._handlerList:  # pyright: ignore
        if type(handler := reference()) is logging.StreamHandler:  # pyright: ignore
            handler.setStream(sys.stderr)  # pyright: ignore


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
    process_file = os.pidfd_open(pid)
    if process_file in select.select([process_file, connection], [], [])[0]:
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
    util.spawnv_passfds = fork_forkserver  # pyright: ignore[reportAttributeAccessIssue]
    if words[0] == "-u":
        sys.stdout.reconfigure(write_through=True, line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        words = words[1:]
    mode, *rest = words
    if mode == "-m":
        sys.argv, sys.path[0] = rest, folder
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif mode == "-c":
        sys.argv, sys.path[0] = ["-c", *rest[1:]], ""
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv, sys.path[0], subprocess.Popen = list(words), str(Path(mode).parent), WarmProcess
        runpy.run_path(mode, run_name="__main__")


def _end(status: object) -> None:
    """End this process as `sys.exit(status)` does, without freeing its modules: that would copy the server's memory."""
    threading._shutdown()  # pyright: ignore
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0 if status is None else status & 0xFF if isinstance(status, int) else 1)


def _serve(listening: socket.socket, alive: int) -> None:
    """Fork for each request, until the process that started this server has ended."""
    for name in IMPORTED:
        import_module(name)
    import_module("shardlab.cli").command_of(["train"])  # has tyro read the options of most programs
    weakref.finalize._registry.clear()  # pyright: ignore
    gc.freeze()  # a collection in a fork would copy all memory that was there before
    WarmProcess.address = listening.getsockname()
    setattr(import_module(TORCHRUNS), "Popen", WarmProcess)  # noqa: B010
    # Waiting nodes look up the name of their method in the sources of all modules, hundreds of times a second.
    setattr(import_module(RENDEZVOUS), "get_method_name", lambda depth=2: sys._getframe(depth).f_code.co_name)  # pyright: ignore # noqa: B010
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while alive not in select.select([listening, alive], [], [])[0]:
        connection, _ = listening.accept()
        if not os.fork():
            listening.close()
            try:
                _attend(connection)
            except SystemExit as end:
                if isinstance(end.code, str):
                    print(end.code, file=sys.stderr)
                _end(end.code)
            except BaseException as error:
                sys.excepthook(type(error), error, error.__traceback__)
                if isinstance(error, KeyboardInterrupt):
                    signal.signal(signal.SIGINT, signal.SIG_DFL)
                    signal.raise_signal(signal.SIGINT)
                _end(1)
            _end(0)
        connection.close()


if __name__ == "__main__":
    with listening_at(sys.argv[1]) as listening:
        print("listening", flush=True)
        _serve(listening, sys.stdin.fileno())
