"""What ranks lose where they meet, on cores that communication needs as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lag:
    """Seconds by which ranks come apart where they wait for each other, since communication needs their cores as well.

    The rank that has what it waited for computes at once, and the other one's communication stands in the queue for a
    core until that rank stops, or until the system's scheduler looks again.

    Attributes:
        share: of what a rank has computed since it last waited, what it loses where it stands still for others.
        most: seconds that it loses there at most.
        hidden: the part of these seconds that it loses where their communication was over before.
    """

    share: float
    most: float
    hidden: float = 0.0

    def seconds(self, computed: float, *, hidden: bool = False) -> float:
        """What a rank loses where it waits, having computed for so many seconds since it last did."""
        return min(self.share * computed, self.most) * (self.hidden if hidden else 1.0)


NO_LAG = Lag(0.0, 0.0)
