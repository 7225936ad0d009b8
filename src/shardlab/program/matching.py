"""Who communicates with whom: what each rank issues as its k-th on a channel belongs together.

A channel is a group, whose ranks meet in collectives, or (source, destination), along which messages keep their order,
or (rank,), on which it copies alone.
Tracing, the check, folding and drawing all match here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, NamedTuple, TypeVar

from shardlab.program.mesh import Group
from shardlab.program.ops import COMMUNICATION, OpKind, Stream
from shardlab.program.tape import Op, Program

Channel = Group | tuple[int, ...]
Part = TypeVar("Part")

SEND, COLLECTIVE, COPY = OpKind.SEND, Stream.COLLECTIVE, Stream.COPY

EXCHANGES = "exchanges"
"""The communicator of all exchanges: the world's, which is there before the first op."""


class Participant(NamedTuple):
    """One rank's part in a communication: its handle, and the index of the op that issues it."""

    rank: int
    handle: int
    op: int


class Communication(NamedTuple):
    """A communication with all its parts.

    Attributes:
        stream: whether it is a collective, a message or a copy.
        group: of a collective.
        participants: in group order; of a message sender, then receiver; of a copy its rank.
    """

    stream: Stream
    group: Group | None
    participants: list[Participant]


class ChannelQueue(Generic[Part]):
    """One channel: puts the parts of its communications together, whichever comes first. What is whole is forgotten."""

    __slots__ = ("_done", "_issued", "_ranks", "open", "size")

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self._ranks = ranks
        self.size = len(ranks)
        self._issued = dict.fromkeys(ranks, 0)
        self._done = 0
        self.open: deque[dict[int, Part]] = deque()

    def next(self, rank: int) -> dict[int, Part]:
        """The parts, by rank in the order in which they arrived, of what this rank joins now; it adds its own."""
        number = self._issued[rank]
        self._issued[rank] = number + 1
        place = number - self._done
        if place == len(self.open):
            arrived: dict[int, Part] = {}
            self.open.append(arrived)
            return arrived
        return self.open[place]

    def whole(self) -> list[Part]:
        """All parts of the first open communication, in the channel's order, once as many have joined it.

        Each rank's k-th part joins the k-th communication, so whichever is whole is the first that is open.
        """
        self._done += 1
        arrived = self.open.popleft()
        parts = [arrived[rank] for rank in self._ranks]
        arrived.clear()  # a part may refer to it
        return parts


class Matcher(dict[Channel, ChannelQueue[Part]]):
    """The channels in use, each made when it is first asked for."""

    def __missing__(self, channel: Channel) -> ChannelQueue[Part]:
        queue = self[channel] = ChannelQueue[Part](channel.ranks if isinstance(channel, Group) else channel)
        return queue

    def left(self) -> Iterator[dict[int, Part]]:
        """What is not whole, channel by channel."""
        for queue in self.values():
            yield from queue.open


def channel_of(rank: int, op: Op) -> Channel | None:
    """The channel of a communication; None if its op names neither a group nor a peer."""
    stream = op[0].row.stream
    if stream is COLLECTIVE:
        return op.group
    if stream is COPY:
        return (rank,)
    if op.peer < 0:
        return None
    return (rank, op.peer) if op[0] is SEND else (op.peer, rank)


def communications_of(
    program: Program, channel_of: Callable[[int, Op], Channel | None] = channel_of
) -> tuple[list[Communication], list[dict[int, int]]]:
    """All communications of a program, from its tapes alone, and for each tape the place in them of each handle.

    They come in the order of their last members, which name tapes. What has no peer among the tapes is left out.

    Args:
        program: on whose tapes ops have been issued in an order that can be.
        channel_of: the channel on which a rank issues an op.
    """
    matcher = Matcher[Participant]()
    communications: list[Communication] = []
    apart = program.mesh.world // program.ranks  # of folded tapes, those of a pipeline's first ranks
    for row, tape in enumerate(program.tapes):
        rank = row * apart
        for at, op in enumerate(tape):
            if op[0] not in COMMUNICATION:
                continue
            channel = channel_of(rank, op)
            if channel is None:
                continue
            end = rank
            if isinstance(channel, tuple):
                end = channel[0] if op[0] is SEND else channel[-1]
            queue = matcher[channel]
            arrived = queue.next(end)
            arrived[end] = Participant(row, op.handle, at)
            if len(arrived) == queue.size:
                communications.append(Communication(op[0].row.stream, op.group, queue.whole()))
    communications.sort(key=lambda communication: communication.participants[-1])
    places: list[dict[int, int]] = [{} for _ in program.tapes]
    for place, communication in enumerate(communications):
        for member in communication.participants:
            places[member.rank][member.handle] = place
    return communications, places


def communicator(program: Program, communication: Communication) -> Hashable:
    """What carries a communication (as ProcessGroupNCCL does without `device_id`).

    A group's collectives have one, the single messages of two ranks another, and all exchanges a third. A rank's copies
    to and from elsewhere have a link each.
    """
    if communication.stream is COLLECTIVE:
        return communication.group
    if communication.stream is COPY:
        ((rank, _, at),) = communication.participants
        return rank, program.tapes[rank][at].kind
    if any(program.tapes[rank][at].batch >= 0 for rank, _, at in communication.participants):
        return EXCHANGES
    return frozenset(member.rank for member in communication.participants)


def stream_of(program: Program, communication: Communication) -> Hashable:
    """What a communication takes turns with on each of its ranks: all on its communicator.

    What is exchanged in one call crosses, so there each direction counts alone.
    """
    found = communicator(program, communication)
    return tuple(member.rank for member in communication.participants) if found is EXCHANGES else found
