"""Program that becomes a rank of `shardlab launch`: it sets the rank's variables and replaces itself by the command.

`python -m shardlab.train.launch.worker [--bind] COMMAND ...`
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from shardlab.language import UserError
from shardlab.train.launch.environment import LaunchEnvironment, bind, find_launch_environment, usable_cpus

_PR_SET_PDEATHSIG = 1


def as_program(command: Sequence[str]) -> list[str]:
    """Return the arguments with which a command is started. A Python file is run by this Python interpreter.

    Raises:
        UserError: if the command is empty, or there is no such program or file.
    """
    if not command:
        raise UserError("there is no command; give one after --, such as: shardlab launch --ranks 2 -- train.py")
    words = [sys.executable, *command] if command[0].endswith(".py") else list(command)
    if words[0] == sys.executable and len(words) > 1 and words[1].endswith(".py") and not os.path.exists(words[1]):
        raise UserError(f"there is no file {words[1]}")
    if shutil.which(words[0]) is None:
        raise UserError(
            f"there is no program {words[0]}; give a command that the shell would find, or a file that ends in .py"
        )
    return words


def become(environment: LaunchEnvironment, command: Sequence[str], *, bound: bool) -> NoReturn:
    """Replace this process by a command, with the environment variables of its rank.

    Args:
        bound: bind the process to CPUs that no other rank of this host uses.

    Raises:
        UserError: if the process cannot be bound, or the command cannot be started.
    """
    if bound:
        bind(environment)
    host_ranks = 1 if bound else environment.local_world or 1
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, len(usable_cpus()) // host_ranks))
    variables = {**os.environ, **environment.variables(), "OMP_NUM_THREADS": threads, "PYTHONUNBUFFERED": "1"}
    try:
        os.execvpe(command[0], list(command), variables)
    except OSError as error:
        raise UserError(f"{command[0]} cannot be started ({error.strerror})") from error


def main(words: Sequence[str]) -> NoReturn:
    """Replace this process by a command, as the rank that the variables of `shardlab launch` describe."""
    end_with_parent()
    environment = find_launch_environment(os.environ)
    assert environment is not None, "the agent sets the variables"
    bound = words[0] == "--bind"
    try:
        become(environment, words[bound:], bound=bound)
    except UserError as error:
        sys.exit(f"shardlab: {error}")


def end_with_parent() -> None:
    """Ask the kernel to send SIGTERM to this process, or to the program that replaces it, when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    main(sys.argv[1:])
