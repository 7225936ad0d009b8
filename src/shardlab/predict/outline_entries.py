"""What stands in an outline: seconds of compute, and where a rank meets others or waits.

No entry says where in a step it stands, so that what is repeated stands in an outline as often as it is done.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardlab.predict.passes import Crest, Held
from shardlab.predict.priced_sample import SizedPart
from shardlab.program import Group


class Compute:
    """Seconds of compute, to which more may be added."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Issue(NamedTuple):
    """A collective of ranks that are alike; it takes its group's stream."""

    group: Group
    seconds: float


class Await(NamedTuple):
    """A wait for a collective: the last one that was begun (1), or one before it."""

    ago: int


class Join(NamedTuple):
    """A part in a communication with other rows, the next one on its channel.

    Attributes:
        stream: what it takes turns on: the group, or the two ranks of a message.
        blocks: seconds for which nothing else is done.
    """

    channel: Hashable
    stream: Hashable
    members: int
    seconds: float
    blocks: float = 0.0


class OutlinedMessage(NamedTuple):
    """A message to or from another row, on one of the rank's ways."""

    way: int


class Take(NamedTuple):
    """A wait for a message: the next one on its way that was not waited for (0), or one after it."""

    way: int
    turn: int


class Way(NamedTuple):
    """A kind of message.

    Attributes:
        sends: whether the rank sends it.
        further: how much further the other rank is.
        part: what it is.
        layer: that it enters, or whose gradient it is, where it is received.
    """

    sends: bool
    further: int
    part: SizedPart
    layer: int = -1


Entry = Compute | Issue | Await | Join | OutlinedMessage | Take


class OutlinedStep(NamedTuple):
    """What a rank does in one step of its schedule.

    Attributes:
        entries: in order.
        bytes, held: what it leaves behind, less what was there before, in all and by category.
        crest: the most that it holds beyond what was held when it began (None: nothing is noted in it).
    """

    entries: list[Entry]
    bytes: int
    held: Held
    crest: Crest | None
