"""What a pipeline schedule is made of: which work one rank does, in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Forward:
    """A stage's forward pass on a microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True)
class Backward:
    """A stage's backward pass on a microbatch."""

    stage: int
    microbatch: int


Action = Forward | Backward

Schedule = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, ranks, microbatches, stages per rank) to what the rank does. Stage s is on rank s mod ranks."""
