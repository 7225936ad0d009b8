"""Record of one rank's tape while it really ran, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Moments(NamedTuple):
    """Moments of one op, in seconds of its process's clock; None is what did not come before the step failed.

    Attributes:
        began: when the rank came to it.
        ended: when the rank went on to the next; of a communication, when it had been issued.
        over: of a communication, when this rank's part was complete.
    """

    began: float
    ended: float | None
    over: float | None = None


@dataclass
class StepRecord:
    """One step of one rank.

    Attributes:
        began, ended: the whole step, with what the tape does not show; `ended` is None if it failed.
        ops: by place on the tape.
    """

    began: float
    ended: float | None = None
    ops: dict[int, Moments] = field(default_factory=dict[int, Moments])


@dataclass
class MemoryRecord:
    """The memory of one step of one rank.

    Attributes:
        live: bytes at the start of each op, by place on the tape and by category.
        peak: the most bytes at any moment, what ops need only while they run included.
    """

    live: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    peak: int = 0


@dataclass
class RankRecord:
    """What one rank saw.

    Attributes:
        rank: its number.
        offset: what to take from its clock to have rank 0's, in seconds.
        bound: the most that the offset may be wrong by.
        steps: those that were timed, the last perhaps only as far as it came.
        memory: of a step that was not timed; None if there was none.
    """

    rank: int
    offset: float = 0.0
    bound: float = 0.0
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    memory: MemoryRecord | None = None
