"""Vocabulary of pipeline schedules: the passes of a stage, the placement of stages on ranks, and `Schedule` itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """Pass of a stage on one microbatch."""

    stage: int
    microbatch: int


@dataclass(frozen=True)
class Forward(Work):
    """Forward pass of a stage on a microbatch."""


@dataclass(frozen=True)
class Backward(Work):
    """Backward pass of a stage on a microbatch."""


@dataclass(frozen=True)
class BackwardInput(Work):
    """First half of a backward pass: the gradient of the stage's input, which the previous stage needs."""


@dataclass(frozen=True)
class BackwardWeight(Work):
    """Second half of a backward pass: the gradients of the stage's weights, which only the optimizer needs."""


Action = Forward | Backward | BackwardInput | BackwardWeight

Actions = Callable[[int, int, int, int], Iterator[Action]]
"""Function from (rank, ranks, microbatches, stages per rank) to the actions of the rank, in order."""

Placement = Callable[[int, int], int]
"""Function from (stage, ranks) to the rank of the stage."""


def loop(stage: int, ranks: int) -> int:
    """Place stages on ranks 0, 1, ..., p - 1, 0, 1, ..."""
    return stage % ranks


def vee(stage: int, ranks: int) -> int:
    """Place stages on ranks 0, 1, ..., p - 1, p - 1, ..., 1, 0. The first rank also has the last stage."""
    return min(stage, 2 * ranks - 1 - stage)


@dataclass(frozen=True)
class Schedule:
    """Pipeline schedule for any number of ranks and microbatches.

    Attributes:
        name: name on the command line.
        actions: generator of the actions of one rank.
        source: the paper or file that describes it.
        placement: function that places stages on ranks.
        stages_per_rank: number of stages that each rank must have (None: any number).
    """

    name: str
    actions: Actions
    source: str = "the user"
    placement: Placement = loop
    stages_per_rank: int | None = 1
