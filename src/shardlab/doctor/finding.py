"""A check's finding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class Finding:
    """What a check found.

    Attributes:
        check: what was looked at.
        present: what is there.
        remedy: what to do, if something is wrong.
        state: "ok", "warning" (training works, but slowly or not for long) or "error" (it does not work).
        host: where; empty if all hosts are meant.
    """

    check: str
    present: str
    remedy: str = ""
    state: State = "ok"
    host: str = ""
