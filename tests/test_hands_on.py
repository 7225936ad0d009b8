"""The hands-on session runs as it is written: every command in one folder, and each prints what the page shows.

Numbers differ, runs are shortened, and a text of the same 65 characters stands for tiny Shakespeare.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import numpy as np

from tests.support.ranks import PRELOAD
from tests.support.warm import WarmStarts
from tests.test_readme import OF_SESSIONS, TEXTS, elsewhere, shortened, squeezed

__all__ = ["elsewhere"]

CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
END = "\x1e"
"""Ends what a command prints; its exit status follows."""

SESSION = f"""
import shlex, sys
from multiprocessing import forkserver
from shardlab.cli import main
from shardlab.train.data import documents
from shardlab.train.launch.processes import _start_forkserver
documents.SHAKESPEARE_SHA256 = sys.argv[1]
forkserver.set_forkserver_preload({PRELOAD})
_start_forkserver()
for line in sys.stdin:
    print(main(shlex.split(line)[1:]), end="\\n{END}", flush=True)
"""


def flat(text: str) -> str:
    """A text up to numbers and line breaks. On a busy machine, computing hides none of a collective."""
    return " ".join(squeezed(text).split()).replace("#% none", "#% #%")


def test_the_hands_on_session_runs_as_it_is_written(elsewhere: Path, warm: WarmStarts) -> None:
    """In a process of its own, whose output and errors are one file, as in a terminal.

    All ranks of all commands are forked from one server, which has the imports of each.
    """
    numbers = np.random.default_rng(0).integers(0, len(CHARACTERS), 40_000)
    text = "".join(CHARACTERS[number] for number in numbers.tolist())
    assert len(set(text)) == len(CHARACTERS) == 65
    (elsewhere / "input.txt").write_text(text)
    commands = [command for block in OF_SESSIONS for command in block.commands]
    assert len(commands) == TEXTS["docs/hands-on.md"].count("\n$ ")
    with warm.start(
        ["-u", "-c", SESSION, hashlib.sha256(text.encode()).hexdigest()],
        cwd=elsewhere,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        output, _ = process.communicate("\n".join(shortened(command.line) for command in commands))
    *printed, rest = output.split(END)
    assert (len(printed), rest) == (len(commands), ""), output
    for command, whole in zip(commands, printed, strict=True):
        output, _, status = whole.rpartition("\n")[0].rpartition("\n")
        refused = command.output.startswith("shardlab: ")
        assert (status != "0") == refused, f"{command.line}: {whole}"
        remaining = flat(output)
        for expected in map(flat, command.output.split("...\n")):
            skipped, match, remaining = remaining.partition(expected) if expected else ("", "", remaining)
            assert match == expected, f"{command.line}: {expected!r} is not in what follows {skipped!r}"
