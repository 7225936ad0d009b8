"""Messages between ranks: each rank has one mailbox, and a mailbox holds one message.

Nothing is delivered while a rank can still go on; then what comes first in simulated time happens, and nothing else.
So results do not depend on the order in which an event loop runs the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardlab.program.waiting import Wait
from shardlab.puzzles.lines import Line, at
from shardlab.puzzles.watch import Watch
from shardlab.rules.pieces import listed


@dataclass(eq=False)
class Message:
    """A value on its way; `inside` once it lies in the mailbox, which lets its sender go on."""

    sender: int
    to: int
    value: Any
    sent: float
    about: str
    line: Line | None = None
    inside: bool = False

    def wait(self) -> Wait:
        what = f"pass_to(rank {self.to}) of {self.about}, whose mailbox is full, for rank {self.to}{at(self.line)}"
        return Wait(what, [self.to])


@dataclass(eq=False)
class Receive:
    """A rank that waits for a message, whoever sends it."""

    rank: int
    time: float
    line: Line | None = None
    message: Message | None = None


class Mail:
    """Every message under way and every rank that waits for one."""

    def __init__(self, ranks: int, watch: Watch) -> None:
        self._ranks = range(ranks)
        self._watch = watch
        self._messages: list[list[Message]] = [[] for _ in self._ranks]
        self._receives: list[list[Receive]] = [[] for _ in self._ranks]

    async def send(self, message: Message) -> None:
        """Wait until the message lies in the mailbox or has been taken."""
        self._messages[message.to].append(message)
        try:
            await self._watch.block(message.sender, message, message.wait)
        except BaseException:
            if message in self._messages[message.to]:
                self._messages[message.to].remove(message)
            raise

    async def receive(self, rank: int, time: float, line: Line | None) -> Message:
        """The message to `rank` that was sent first; of two sent at once, the one from the lower rank."""
        receive = Receive(rank, time, line)
        self._receives[rank].append(receive)
        try:
            await self._watch.block(rank, receive, lambda: self._wait(receive))
        finally:
            if receive in self._receives[rank]:
                self._receives[rank].remove(receive)
        assert receive.message is not None
        return receive.message

    def _wait(self, receive: Receive) -> Wait:
        """Any other rank could send: those are named first that wait themselves."""
        rank = receive.rank
        others = [r for r in self._ranks if r != rank] or [rank]
        waiting, ended = self._watch.waiting(), [r for r in self._watch.ended() if r != rank]
        over = f" (rank{'s' * (len(ended) > 1)} {listed(ended)} ended)" if ended else ""
        what = f"receive() for a message from any rank{over}{at(receive.line)}"
        return Wait(what, [r for r in others if r in waiting] or others)

    def advance(self) -> bool:
        """Let the earliest thing that can happen, happen; False if nothing can."""
        best: tuple[float, int, int] | None = None
        for rank in self._ranks:
            messages, receives = self._messages[rank], self._receives[rank]
            if not messages:
                continue
            first = _first(messages)
            if not any(message.inside for message in messages):
                best = min(best or (first.sent, 0, rank), (first.sent, 0, rank))
            if receives:
                start = max(first.sent, receives[0].time)
                best = min(best or (start, 1, rank), (start, 1, rank))
        if best is None:
            return False
        _, taking, rank = best
        self._take(rank) if taking else self._deposit(rank)
        return True

    def _deposit(self, rank: int) -> None:
        message = _first(self._messages[rank])
        message.inside = True
        self._watch.wake(message.sender, message)

    def _take(self, rank: int) -> None:
        receive, message = self._receives[rank].pop(0), _first(self._messages[rank])
        self._messages[rank].remove(message)
        receive.message = message
        self._watch.wake(rank, receive)
        self._watch.wake(message.sender, message)


def _first(messages: list[Message]) -> Message:
    return min(messages, key=lambda message: (message.sent, message.sender))
