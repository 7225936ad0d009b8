"""Results of a comparison, in seconds and bytes, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any, NamedTuple

LOSSES_AGREE = 1e-4
"""The most by which losses may differ, relative to them."""


class Spread(NamedTuple):
    """The median of several figures, and the two between which the middle half of them lies."""

    low: float
    median: float
    high: float


def spread_of(figures: Sequence[float]) -> Spread:
    """The quartiles of some figures; of one, itself three times."""
    return Spread(*(quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [*figures] * 3))


class Parts(NamedTuple):
    """Where the time of a usual step goes, in seconds.

    Attributes:
        compute: what the floor's thread has a core for: kernels, and autograd as plain PyTorch calls them.
        overhead: for what more than that this side's thread has a core; below zero, it computes less.
        waiting: the rest of the step, in which the thread has no core: it waits for another rank, or for its turn.
    """

    compute: float
    overhead: float
    waiting: float


@dataclass(frozen=True)
class Side:
    """One side's timed steps.

    Attributes:
        seconds: of each step, the slowest rank's.
        computing: for which the thread that trains had a core, the mean over ranks.
        peak: bytes, the most of any rank.
    """

    seconds: list[float]
    computing: list[float]
    peak: int

    def parts(self, floor: Side) -> Parts:
        """Where its time goes, beside a floor's."""
        whole, had, compute = median(self.seconds), median(self.computing), median(floor.computing)
        return Parts(compute, had - compute, max(0.0, whole - had))

    def over(self, floor: Side) -> Spread:
        """Ratios of its steps to the floor's of the same turn."""
        return ratios(self, floor)


def ratios(side: Side, other: Side) -> Spread:
    """Ratios of two sides' steps of the same turn: neighbours, so that what slows both of them down cancels."""
    return spread_of([a / b for a, b in zip(side.seconds, other.seconds, strict=True)])


def error_of(losses: Sequence[float], others: Sequence[float]) -> float:
    """The largest difference of two losses, relative to the loss; not a number where one of them is not."""
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("nan")


@dataclass(frozen=True)
class Compared:
    """A pair, compared.

    Attributes:
        ours, theirs, floor: the timed steps of each.
        our_losses, their_losses: mean loss of every step, those before the timed ones included.
    """

    ours: Side
    theirs: Side
    floor: Side
    our_losses: list[float]
    their_losses: list[float]

    @property
    def loss_error(self) -> float:
        """The largest difference of two losses, relative to the loss; not a number where one of them is not."""
        return error_of(self.our_losses, self.their_losses)

    @property
    def agrees(self) -> bool:
        """Whether both sides train alike; only then do their times say anything."""
        return self.loss_error <= LOSSES_AGREE

    @property
    def ratio(self) -> Spread:
        """Our time over theirs."""
        return ratios(self.ours, self.theirs)

    @property
    def memory(self) -> float:
        """Our peak memory over theirs."""
        return self.ours.peak / self.theirs.peak

    def as_dict(self) -> dict[str, Any]:
        """All figures, in seconds and bytes."""
        return {
            "loss_error": self.loss_error,
            "ratio": self.ratio._asdict(),
            "memory_ratio": self.memory,
            "floor": {"seconds": median(self.floor.seconds), "turns": self.floor.seconds},
            **{name: self._side(side) for name, side in (("ours", self.ours), ("theirs", self.theirs))},
        }

    def _side(self, side: Side) -> dict[str, Any]:
        return {
            "seconds": median(side.seconds),
            "parts": side.parts(self.floor)._asdict(),
            "over_floor": side.over(self.floor)._asdict(),
            "peak_bytes": side.peak,
            "turns": side.seconds,
        }
