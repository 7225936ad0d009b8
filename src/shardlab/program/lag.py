"""What ranks lose where they meet, on cores that communication needs as well."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Lag:
    """Seconds by which ranks come apart where they wait for each other, since communication needs their cores as well.

    The rank that has what it waited for computes at once, and the other one's communication stands in the queue for a
    core until that rank stops, or until the system's scheduler looks again. Where nobody waits, since a collective was
    over before, none of that is seen.

    Attributes:
        share: of what a rank has computed since it last met the others.
        most: seconds at most.
    """

    share: float
    most: float

    def seconds(self, computed: float) -> float:
        """What is lost where ranks meet that have computed for so many seconds since they last did."""
        return min(self.share * computed, self.most)


NO_LAG = Lag(0.0, 0.0)
