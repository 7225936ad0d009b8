"""The hands-on session runs as it is written: every command in one folder, and each prints what the page shows.

Numbers differ, runs are shortened, and a text of the same 65 characters stands for tiny Shakespeare.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from shardlab.cli import main
from shardlab.data import shakespeare as tiny
from tests.test_readme import OF_SESSIONS, TEXTS, elsewhere, squeezed

__all__ = ["elsewhere"]

pytestmark = pytest.mark.xdist_group("ranks")
CHARACTERS = "\n !$&',-.3:;?ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MOST_STEPS = 16
"""What --trace needs."""


def shortened(line: str) -> list[str]:
    """A command with fewer steps."""
    return shlex.split(re.sub(r"--steps (\d+)", lambda m: f"--steps {min(int(m[1]), MOST_STEPS)}", line))[1:]


def test_the_hands_on_session_runs_as_it_is_written(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = np.random.default_rng(0).integers(0, len(CHARACTERS), 40_000)
    text = "".join(CHARACTERS[each] for each in drawn.tolist())
    (elsewhere / "input.txt").write_text(text)
    monkeypatch.setattr(tiny, "SHA256", hashlib.sha256(text.encode()).hexdigest())
    assert len(set(text)) == len(CHARACTERS) == 65
    commands = [command for block in OF_SESSIONS for command in block.commands]
    assert len(commands) == TEXTS["docs/hands-on.md"].count("\n$ ")
    for command in commands:
        status = main(shortened(command.line))
        written = capfd.readouterr()
        assert (status == 0) == (not command.output.startswith("shardlab: ")), f"{command.line}: {written.err}"
        rest = squeezed("".join(line.rstrip() + "\n" for line in (written.err + written.out).splitlines()))
        for shown in filter(None, squeezed(command.output).split("...\n")):
            before, found, rest = rest.partition(shown)
            assert found == shown, f"{command.line}: {shown!r} is not in what follows {before!r}"
