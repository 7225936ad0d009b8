"""Messages between ranks: each rank has one mailbox, and a mailbox holds one message.

Nothing is delivered while a rank can still go on; then what comes first in simulated time happens, and nothing else.
So results do not depend on the order in which an event loop runs the ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardlab.program.lines import at
from shardlab.program.values import Wait
from shardlab.puzzles.asyncio_watch import AsyncioWatch, Blocked
from shardlab.rules.pieces import listed


@dataclass(eq=False)
class Letter(Blocked):
    """A value on its way; `inside` once it lies in the mailbox, which lets its sender go on."""

    to: int
    value: Any
    sent: float
    about: str
    inside: bool = False

    def wait(self) -> Wait:
        what = f"pass_to(rank {self.to}) of {self.about}, whose mailbox is full, for rank {self.to}{at(self.line)}"
        return Wait(what, [self.to])


@dataclass(eq=False)
class Reader(Blocked):
    """A rank that waits for a letter, whoever sends it."""

    since: float
    watch: AsyncioWatch

    def wait(self) -> Wait:
        """Any other rank could send: those are named first that wait themselves."""
        others = [r for r in range(self.watch.ranks) if r != self.rank] or [self.rank]
        waiting, ended = self.watch.waiting(), [r for r in self.watch.ended() if r != self.rank]
        over = f" (rank{'s' * (len(ended) > 1)} {listed(ended)} ended)" if ended else ""
        what = f"receive() for a message from any rank{over}{at(self.line)}"
        return Wait(what, [r for r in others if r in waiting] or others)


class Mail:
    """Every letter under way and every rank that waits for one."""

    def __init__(self) -> None:
        self.letters: list[Letter] = []
        self.readers: list[Reader] = []

    def advance(self) -> bool:
        """Let the earliest thing that can happen, happen; False if nothing can.

        A rank takes the letter that was sent first; of two sent at once, the one from the lower rank.
        """
        letters = sorted(
            (letter for letter in self.letters if letter.inside or not letter.future.done()),
            key=lambda letter: (letter.sent, letter.rank),
        )
        first = {letter.to: letter for letter in reversed(letters)}
        full = {letter.to for letter in letters if letter.inside}
        reader = {reader.rank: reader for reader in reversed(self.readers) if not reader.future.done()}
        self.letters, self.readers = letters, [r for r in self.readers if not r.future.done()]
        possible = [(letter.sent, 0, to) for to, letter in first.items() if to not in full]
        possible += [(max(first[to].sent, reader[to].since), 1, to) for to in first.keys() & reader.keys()]
        if not possible:
            return False
        _, taken, to = min(possible)
        letter = first[to]
        if taken:
            self.letters.remove(letter)
            reader[to].go_on(letter)
        letter.inside = True
        letter.go_on()
        return True
