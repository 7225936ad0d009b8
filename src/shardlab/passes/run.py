"""Passes one after the other: each candidate is checked and replayed, and the best one is kept."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from shardlab.check import Checked, check
from shardlab.errors import Refused
from shardlab.passes.table import PASSES, Pass
from shardlab.program import Sizes
from shardlab.timeline.clocks import Clocks
from shardlab.timeline.costs import UNIT_COSTS
from shardlab.timeline.memory import memory_in_bytes
from shardlab.timeline.prices import Prices

GAIN = 1e-9
"""A share of the step: what gains less is left as it is."""


@dataclass(frozen=True)
class Goal:
    """What makes a program better than another: it is faster, or as fast with less memory.

    Attributes:
        prices: how long things take.
        memory: bytes of a rank that must not be exceeded; a program that needs more already must not need more still.
        kept: how large values are in memory, if not as traced.
    """

    prices: Prices = UNIT_COSTS
    memory: float = math.inf
    kept: Sizes | None = None

    def of(self, checked: Checked) -> tuple[float, int]:
        """When a program's step ends, and the bytes of its fullest rank."""
        end = Clocks(checked, self.prices).run().end
        return end, max(memory.peak for memory in memory_in_bytes(checked, self.kept))


@dataclass(frozen=True)
class Passed:
    """A program after a pass, or before the first.

    Attributes:
        name: of the pass ("": there was none yet).
        checked: the program.
        end: when its step ends.
        peak: bytes of its fullest rank.
        number: with which number the pass has found a better one (0: it has found none).
    """

    name: str
    checked: Checked
    end: float
    peak: int
    number: int = 0

    def better(self, other: Passed, memory: float) -> bool:
        """Whether this is to be preferred to another."""
        if self.peak > max(memory, other.peak):
            return False
        least = GAIN * other.end
        return self.end < other.end - least or (self.end <= other.end + least and self.peak < other.peak)


def run_passes(checked: Checked, passes: Iterable[Pass], goal: Goal | None = None) -> list[Passed]:
    """Run passes over a program.

    No pass makes it slower, takes more memory than allowed, or makes it unfit for a backend on which it ran.

    Returns:
        The program as it was, and as each pass left it.
    """
    goal = goal or Goal()
    found = [Passed("", checked, *goal.of(checked))]
    for each in passes:
        before = best = found[-1]
        for number in each.numbers:
            tapes = each.rewrite(before.checked, number)
            if tapes == before.checked.program.tapes:
                continue
            try:
                candidate = check(replace(before.checked.program, tapes=tapes))
            except Refused:
                continue
            if set(before.checked.backends()) <= set(candidate.backends()):
                passed = Passed(each.name, candidate, *goal.of(candidate), number)
                best = passed if passed.better(best, goal.memory) else best
        found.append(best if best is not before else replace(before, name=each.name, number=0))
    return found


def settled(found: Iterable[Passed]) -> str:
    """The passes that have found something, with their numbers, as `find_passes` reads them."""
    words = (f"{each.name}={each.number}" if PASSES[each.name].means else each.name for each in found if each.number)
    return ",".join(words) or "none"
