"""Expected refusals, by their fields. Their messages are pinned once, in a table of refusals."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import pytest

from shardlab.check import check
from shardlab.common.errors import Refused, Rule
from shardlab.language import Program


class ExpectedRefusal(NamedTuple):
    """Expected fields of a refusal: its rule, and others by name."""

    rule: Rule
    fields: Mapping[str, object]


def refusal_by(rule: Rule, **fields: object) -> ExpectedRefusal:
    return ExpectedRefusal(rule, fields)


def require_refusal(refused: BaseException | None, rule: Rule | ExpectedRefusal, **fields: object) -> None:
    """Expect a refusal by this rule with these fields; fields for doubled or missing things are required."""
    assert isinstance(refused, Refused), f"not refused: {refused!r}"
    expected = _expected_fields(ExpectedRefusal(rule, fields) if isinstance(rule, str) else rule)
    assert {name: getattr(refused, name) for name in expected} == expected, str(refused)


def matches(refused: Refused, expected: ExpectedRefusal) -> bool:
    """Whether a refusal is the expected one."""
    return all(getattr(refused, name) == value for name, value in _expected_fields(expected).items())


def _expected_fields(refusal: ExpectedRefusal) -> dict[str, object]:
    return {"rule": refusal.rule, "missing": (), "doubled": (), **refusal.fields}


@contextmanager
def refuses(
    rule: Rule | ExpectedRefusal, *, error: type[Refused] = Refused, **fields: object
) -> Generator[pytest.ExceptionInfo[Refused], None, None]:
    """Expect this refusal in the block."""
    with pytest.raises(error) as caught:
        yield caught
    require_refusal(caught.value, rule, **fields)


def refusal_of(call: Callable[[], object]) -> Refused:
    """The refusal of a call."""
    with pytest.raises(Refused) as caught:
        call()
    return caught.value


def sentence_of(call: Callable[[], object]) -> str:
    """Return the message of a call's refusal, without lines of files."""
    refused = refusal_of(call)
    refused.line = refused.trail = ""
    return str(refused)


def refusal(program: Program) -> Refused | None:
    """Return the refusal of a program by the check. Any other exception is an error of the check."""
    try:
        check(program)
    except Refused as refused:
        return refused
    return None
