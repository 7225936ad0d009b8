"""Events of a pipeline's order of work: passes, messages and what is done to send them, each after two others.

A message begins when its sender and its receiver have come to it; before a rank sends another one to the same rank, it
waits for the one before.
"""

from __future__ import annotations

from collections import defaultdict

from shardlab.strategies.schedules import BackwardWeight, Forward
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.messages import Message, Recv
from shardlab.strategies.schedules.steps import Steps

NOBODY = -1
"""The event that everything else follows, at 0 seconds."""


class _Channel:
    """Messages from one rank to another.

    Attributes:
        sent, received: events after which they are sent, and after which they may be received.
        came: the messages themselves.
        what: whether each goes back, and after which stage's pass.
    """

    __slots__ = ("came", "received", "sent", "what")

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.received: list[int] = []
        self.came: list[int] = []
        self.what: list[tuple[bool, int]] = []


class OrderEvents:
    """Passes, messages and what is done to send them, each with the two events that it follows.

    Attributes:
        level: how many events come before each one, one after the other.
        before, needs: the events that it follows.
        passes: those of each rank, in order.
        messages, sends: events that take the seconds of a message: whether back, and after which stage's pass.
    """

    def __init__(self, steps: Steps) -> None:
        self.level: list[int] = []
        self.before: list[int] = []
        self.needs: list[int] = []
        self.passes: list[list[tuple[int, Work]]] = [[] for _ in steps.of_ranks]
        self.messages: dict[int, tuple[bool, int]] = {}
        self.sends: dict[int, tuple[bool, int]] = {}
        self._steps = steps.of_ranks
        self._at = [0] * len(steps.of_ranks)
        self._now = [NOBODY] * len(steps.of_ranks)
        self._channels: dict[tuple[int, int], _Channel] = defaultdict(_Channel)
        # Messages that are waited for, by the stage that begins with them, whether they go forward, and the microbatch
        self._arriving: dict[tuple[int, bool, int], tuple[_Channel, int]] = {}
        ready = set(range(len(steps.of_ranks)))
        while ready:
            ready |= self._go_on(ready.pop())
        assert all(at == len(order) for at, order in zip(self._at, self._steps, strict=True)), "no order is stuck"

    def _event(self, before: int, needs: int) -> int:
        level = self.level
        first, second = level[before] if before >= 0 else -1, level[needs] if needs >= 0 else -1
        self.before.append(before)
        self.needs.append(needs)
        level.append(1 + (first if first > second else second))
        return len(level) - 1

    def _go_on(self, rank: int) -> set[int]:
        """Follow a rank's order until it has to wait; tell who may go on."""
        order, others = self._steps[rank], set[int]()
        for at in range(self._at[rank], len(order)):
            step = order[at]
            if isinstance(step, Work):
                needs = self._needed(step)
                if needs is None:
                    break
                self._now[rank] = event = self._event(self._now[rank], needs)
                self.passes[rank].append((event, step))
            elif isinstance(step, Message):
                met = self._receive(rank, step) if isinstance(step, Recv) else self._send(rank, step)
                if met is None:
                    break
                if met:
                    others.add(step.peer)
            self._at[rank] = at + 1
        return others

    def _needed(self, step: Work) -> int | None:
        """The message that a pass waits for (None: it has not begun)."""
        arriving = self._arriving.get((step.stage, isinstance(step, Forward), step.microbatch))
        if arriving is None or isinstance(step, BackwardWeight):
            return NOBODY
        channel, number = arriving
        return channel.came[number] if number < len(channel.came) else None

    def _receive(self, rank: int, step: Message) -> bool:
        """Be ready for a message; tell whether it begins."""
        channel = self._channels[step.peer, rank]
        self._arriving[step.stage, step.forward, step.microbatch] = channel, len(channel.received)
        channel.received.append(self._now[rank])
        return self._meet(channel)

    def _send(self, rank: int, step: Message) -> bool | None:
        """Send a message; tell whether it begins (None: the one sent before it has not begun)."""
        channel = self._channels[rank, step.peer]
        number, came, what = len(channel.sent), channel.came, (not step.forward, step.stage)
        if number > len(came):
            return None
        begun = self._event(self._now[rank], came[-1] if number else NOBODY)
        self._now[rank] = event = self._event(begun, NOBODY)  # its sender may do nothing else while it goes
        channel.sent.append(begun)
        channel.what.append(what)
        self.sends[event] = what
        return self._meet(channel)

    def _meet(self, channel: _Channel) -> bool:
        """Let a message begin to which both ranks have come."""
        number = len(channel.came)
        if number == len(channel.sent) or number == len(channel.received):
            return False
        message = self._event(channel.sent[number], channel.received[number])
        self.messages[message] = channel.what[number]
        channel.came.append(message)
        return True
