"""Start Python programs with their imports already done, which take seconds of a core and are the same for each run."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONGEST = 1 << 17
"""Maximum bytes of a request, most of which are environment variables."""


class WarmProcess(subprocess.Popen[Any]):
    """`subprocess.Popen` whose process is forked off a server if it runs this Python.

    Attributes:
        address: the server's socket.
    """

    address = ""
    _answers: socket.socket | None = None

    def _execute_child(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        args: Sequence[Any],
        executable: Any,
        preexec: Any,
        close: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        *rest: Any,
    ) -> None:
        words: list[str] = [os.fspath(word) for word in args]
        if words[0] != sys.executable:
            arguments = args, executable, preexec, close, pass_fds, cwd, env, *rest
            super()._execute_child(*arguments)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]
            return
        pipes, (_, _, _, _, _, new_session, _) = rest[3:9], rest[9:]
        files = [pipes[at] if pipes[at] >= 0 else number for number, at in enumerate((0, 3, 5))]
        request: dict[str, Any] = {"words": words[1:], "variables": dict(os.environ if env is None else env)}
        request |= {"folder": os.fspath(cwd or os.getcwd()), "new_session": new_session}
        self._answers = answers = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        answers.connect(self.address)
        socket.send_fds(answers, [json.dumps(request).encode()], files)
        self.pid = int(answers.recv(LONGEST))
        self._child_created = True
        self._close_pipe_fds(*pipes)  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]

    def _internal_poll(self, *arguments: Any, **options: Any) -> int | None:
        if self._answers is None:
            return super()._internal_poll(*arguments, **options)  # pyright: ignore
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._answers is None:
            return super()._wait(timeout)  # pyright: ignore
        if self.returncode is None:
            if not select.select([self._answers], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answers.recv(LONGEST))
            self._answers.close()
        return self.returncode


def listening_at(address: str) -> socket.socket:
    """Return a socket that accepts connections at an address."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(address)
    listening.listen()
    return listening


class WarmStarts:
    """A server that starts programs with their imports done.

    Args:
        variables: environment variables of the server, whose programs have their own; None: it is a fork of this
            process, which has most of the imports.
    """

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="warm-")
        self._address = f"{self._folder.name}/socket"
        self._close = self._fork() if variables is None else self._spawn(variables)

    def _fork(self) -> Callable[[], object]:
        from tests.support.warm_server import fork_server

        ours, theirs = socket.socketpair()
        with listening_at(self._address) as listening, theirs:
            number = fork_server(listening, theirs.fileno())

        def close() -> None:
            ours.close()
            os.waitpid(number, 0)

        return close

    def _spawn(self, variables: Mapping[str, str]) -> Callable[[], object]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_server", self._address],
            env={**variables, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"listening\n"
        return process.communicate

    def start(self, words: Sequence[str], **options: Any) -> WarmProcess:
        """Start Python with these arguments and options of `subprocess.Popen`."""
        WarmProcess.address = self._address
        return WarmProcess([sys.executable, *words], **options)

    def run(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[str]:
        """Run Python with these arguments until it ends, and return its output as text."""
        pipe = subprocess.PIPE
        with self.start(words, stdout=pipe, stderr=pipe, text=True, **options) as process:
            out, errors = process.communicate()
        return subprocess.CompletedProcess(process.args, process.returncode, out, errors)

    def close(self) -> None:
        """End the server."""
        self._close()
        self._folder.cleanup()
