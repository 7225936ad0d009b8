"""Passes: what a layer's forward or backward pass takes in seconds and bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardlab.program import Group, Kind, OpKind, Spec
from shardlab.strategies.rank_plan import RankPlan
from shardlab.timeline.memory import CATEGORIES

Held = tuple[int, ...]
"""Bytes, in the order of `CATEGORIES`."""

NOTHING: Held = (0,) * len(CATEGORIES)


class Crest(NamedTuple):
    """The most that a pass holds beyond what was held when it began.

    Attributes:
        bytes, held: how much, in all and by category.
        op, layer: during which op, on which layer, counted from the pass's own.
    """

    bytes: int
    held: Held
    op: OpKind
    layer: int


class Meeting(NamedTuple):
    """A collective that is awaited at once.

    Attributes:
        after: seconds of compute before it, since the one before.
        group, seconds: who meets, for how long.
    """

    after: float
    group: Group
    seconds: float


NO_CRESTS = (None, None, None)


@dataclass(frozen=True)
class Pass:
    """A layer's pass, or several one after the other.

    Attributes:
        seconds: from its beginning to its end, on idle streams.
        meetings: its collectives, where all are awaited at once.
        rest: seconds of compute after the last of these.
        held: what it leaves behind, less what was there before.
        crests: the most that it holds before, at and after the op that computes with the weight.
        bytes, changes: `held` in all, and by those categories of which it is not 0.
        groups: those that meet.
    """

    seconds: float
    meetings: tuple[Meeting, ...]
    rest: float
    held: Held
    crests: tuple[Crest | None, Crest | None, Crest | None]
    bytes: int = field(init=False)
    changes: tuple[tuple[int, int], ...] = field(init=False)
    groups: frozenset[Group] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "bytes", sum(self.held))
        object.__setattr__(self, "changes", tuple([(slot, change) for slot, change in enumerate(self.held) if change]))
        object.__setattr__(self, "groups", frozenset(meeting.group for meeting in self.meetings))


PassKey = tuple[object, ...]

Cuts = tuple[int, ...] | None
"""Layers of a block, from its first one, at which stages begin, where it is computed again; None where it is not."""


class PassTable(NamedTuple):
    """Passes of a sample's layers.

    Attributes:
        by_key: each pass, by its name, its layer, and what else tells it apart.
        borders: the value of a kind that enters a layer, or its gradient.
        plan: of the sample's rank.
    """

    by_key: Mapping[PassKey, Pass]
    borders: Mapping[tuple[Kind, int], Spec]
    plan: RankPlan
