"""How many microbatches a step has, where a run's batch grows."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from shardlab.program.field_types import FieldType


@dataclass(frozen=True)
class BatchRamp:
    """Numbers of microbatches, each from a step on.

    >>> ramp = BatchRamp.of("0:4,200:8")
    >>> ramp.microbatches(199), ramp.microbatches(200), ramp.before(202), ramp.steps(816)
    (4, 8, 816, 202)

    Attributes:
        stages: the first step and the microbatches of each number, by ascending steps from 0 on.
    """

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, words: str) -> BatchRamp:
        """What `STEP:MICROBATCHES,...` stands for."""
        pairs = (word.split(":") for word in words.split(","))
        return cls(tuple((int(step), int(microbatches)) for step, microbatches in pairs))

    @property
    def counts(self) -> list[int]:
        """Every number of microbatches that a step may have, once."""
        return list(dict.fromkeys(microbatches for _, microbatches in self.stages))

    def stage(self, step: int) -> tuple[int, int]:
        """The first of the steps that have as many microbatches as a step has, and how many these are."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage[0]) - 1]

    def microbatches(self, step: int) -> int:
        """Of a step."""
        return self.stage(step)[1]

    def before(self, step: int) -> int:
        """Of all steps before one."""
        ends = [*(first for first, _ in self.stages[1:]), step]
        each = zip(self.stages, ends, strict=True)
        return sum(max(0, min(step, end) - first) * microbatches for (first, microbatches), end in each)

    def steps(self, microbatches: int) -> int:
        """The fewest steps that have so many together."""
        reached = [first for first, _ in self.stages if self.before(first) < microbatches] or [0]
        return reached[-1] - (self.before(reached[-1]) - microbatches) // self.microbatches(reached[-1])


def _wanted(value: object) -> str:
    """What to give instead of words that are no ramp."""
    wanted = "ascending steps from 0 on, each with its number of microbatches, such as 0:4,200:8"
    pairs = [word.split(":") for word in value.split(",")] if isinstance(value, str) else []
    if not pairs or any(len(pair) != 2 or not all(map(str.isdecimal, pair)) for pair in pairs):
        return wanted
    steps = [int(step) for step, _ in pairs]
    ascending = steps[0] == 0 and all(first < then for first, then in pairwise(steps))
    return "" if ascending and all(int(microbatches) for _, microbatches in pairs) else wanted


RAMP = FieldType(
    str,
    "STEP:N,...|none",
    lambda value: "" if value is None else _wanted(value),
    lambda words: None if words.lower() == "none" else words,
)
"""Words that `BatchRamp.of` reads; or none, which is None."""
