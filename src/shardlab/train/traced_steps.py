"""Which of a run's steps are recorded."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tracing:
    """How much of a run is recorded.

    Attributes:
        warm_up: steps before, in which memory is first taken and connections are made.
        timed: steps whose ops are timed; they start together on all ranks, as simulated steps do.
        measured: steps, after those, whose memory is measured; of these the last is kept.
    """

    warm_up: int = 3
    timed: int = 10
    measured: int = 2

    @property
    def steps(self) -> int:
        """How many steps a run must have."""
        return self.warm_up + self.timed + self.measured
