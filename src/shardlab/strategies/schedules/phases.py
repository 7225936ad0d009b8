"""Phases of a schedule on a V: each is some passes taken in turn, as its figure is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, repeat

from shardlab.strategies.schedules.actions import Action

Pass = Iterator[Action]
"""One kind of pass of one stage: its next microbatch each time."""


def passes(kind: Callable[[int, int], Action], stage: int, microbatches: Iterator[int] | None = None) -> Pass:
    """A stage's passes of one kind, from microbatch 0 on; kinds that share `microbatches` take turns at them."""
    return map(kind, repeat(stage), microbatches or count())


def in_phases(*phases: tuple[int, list[Pass]]) -> Iterator[Action]:
    """Take the passes of each phase in turn, as many times as it says."""
    for times, turn in phases:
        for _ in range(times):
            yield from map(next, turn)
