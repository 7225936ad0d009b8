"""What stands in an outline: seconds of compute, and where a rank meets others or waits."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from shardlab.program import Group


class Compute:
    """Seconds of compute, to which more may be added."""

    __slots__ = ("seconds",)

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds


class Issue(NamedTuple):
    """A collective of ranks that are alike; it takes its group's stream."""

    handle: int
    group: Group
    seconds: float


class Await(NamedTuple):
    """A wait for what was issued."""

    handle: int


class Join(NamedTuple):
    """A part in a communication with other rows: the k-th on its channel.

    Attributes:
        stream: what it takes turns on: the group, or the two ranks of a message.
        blocks: seconds for which nothing else is done.
    """

    handle: int
    channel: Hashable
    number: int
    stream: Hashable
    members: int
    seconds: float
    blocks: float = 0.0


Entry = Compute | Issue | Await | Join
