"""What is wanted of a program that is right."""

from __future__ import annotations

from shardlab.check import Checked, check
from shardlab.language import Program
from tests.support.interpreter import judge


def is_right(program: Program) -> Checked:
    """It passes the check, and computes the right numbers."""
    checked, verdict = check(program), judge(program)
    assert verdict.right, verdict.reason
    return checked


def is_right_everywhere(program: Program) -> None:
    """It is right, hangs on no channel, and runs on processes."""
    checked = is_right(program)
    assert set(checked.models.values()) == {None}
    assert checked.not_runnable is None
