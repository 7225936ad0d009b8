"""What the check says against a program."""

from __future__ import annotations

from shardlab.check import check
from shardlab.program import Program, Refused


def refusal(program: Program) -> str | None:
    """Its sentence, or None; any other exception than a refusal is the check's own mistake and goes on."""
    try:
        check(program)
    except Refused as refused:
        return str(refused)
    return None
