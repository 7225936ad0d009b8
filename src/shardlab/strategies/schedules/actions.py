"""Parts of a pipeline schedule: what one rank does, in which order, and where the stages are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Work of a stage on one microbatch."""

    stage: int
    microbatch: int


class Forward(Work):
    """A stage's forward pass on a microbatch."""


class Backward(Work):
    """A stage's backward pass on a microbatch."""


class BackwardInput(Work):
    """The half of a backward pass that the stage before waits for: the gradient of the stage's input."""


class BackwardWeight(Work):
    """The other half, which nobody waits for but the optimizer: the gradients of the stage's weights."""


Action = Forward | Backward | BackwardInput | BackwardWeight

Actions = Callable[[int, int, int, int], Iterator[Action]]
"""(rank, ranks, microbatches, stages per rank) to what the rank does, in order."""

Placement = Callable[[int, int], int]
"""(stage, ranks) to the rank that the stage is on."""


def loop(stage: int, ranks: int) -> int:
    """Stage after stage around the ranks: 0, 1, ..., p - 1, 0, 1, ..."""
    return stage % ranks


def vee(stage: int, ranks: int) -> int:
    """Down the ranks and up again: 0, 1, ..., p - 1, p - 1, ..., 1, 0; the first rank also has the last stage."""
    return min(stage, 2 * ranks - 1 - stage)


@dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: a row of the table.

    Attributes:
        name: what the command line calls it.
        actions: the generator.
        source: where it was described.
        placement: which rank a stage is on.
        stages_per_rank: how many stages each rank must have (None: any number).
    """

    name: str
    actions: Actions
    source: str = "the user"
    placement: Placement = loop
    stages_per_rank: int | None = 1
