"""Timeline: what happened when, and how much memory was live; simulation and measurement both produce it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from shardlab.program import OpKind, Program
from shardlab.program.matching import Communication, communications_of
from shardlab.program.ops import BOOKKEEPING
from shardlab.program.picture import picture


class Event(NamedTuple):
    """One op of one rank.

    Attributes:
        rank, op: where it stands on the tapes.
        kind, layer: what was done.
        microbatches: the microbatches acted on, as a bit set.
        start, end: when, in the cost model's unit, or in seconds.
        memory: elements live on the rank when the op starts, before its own result is stored; in a priced step, bytes
            live while it runs, its result among them.
    """

    rank: int
    op: int
    kind: OpKind
    layer: int
    microbatches: int
    start: float
    end: float
    memory: int


@dataclass(frozen=True)
class Timeline:
    """All events of one step, by rank and in tape order.

    Attributes:
        program: the tapes.
        events: for each rank its events; WAIT and FREE are not among them.
        in_seconds: whether times are seconds and memory bytes, rather than unit costs and elements.
    """

    program: Program
    events: list[list[Event]]
    in_seconds: bool = False

    @cached_property
    def steps(self) -> float:
        """When the last op starts: the figure that the puzzles print."""
        return round(max((event.start for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def end(self) -> float:
        """When the last op ends."""
        return round(max((event.end for events in self.events for event in events), default=0.0), 9)

    @cached_property
    def peak_memory_by_rank(self) -> list[int]:
        """The largest number of live elements, or bytes, at an op, for each rank."""
        return [max((event.memory for event in events), default=0) for events in self.events]

    @cached_property
    def peak_memory(self) -> int:
        """The largest over the ranks."""
        return max(self.peak_memory_by_rank)

    @cached_property
    def communications(self) -> list[Communication]:
        """The communications whose members all have rows; a member names its row."""
        return communications_of(self.program)[0]

    def _repr_svg_(self) -> str | None:
        return picture(self)


def is_event(kind: OpKind) -> bool:
    """Whether an op counts as something that happens; WAIT and FREE do not."""
    return kind not in BOOKKEEPING
