"""What goes into a pipe."""

from __future__ import annotations

import pytest

from shardlab.cli import main


@pytest.mark.parametrize(
    "command",
    [
        ["strategies"],
        ["simulate", "fsdp"],
        ["simulate", "ddp", "--ranks", "2", "--model", "gpt2", "--cluster", "a100-40gbx2"],
    ],
)
def test_lines_in_a_pipe_end_without_blanks(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 5
    assert [line for line in lines if line != line.rstrip()] == []
