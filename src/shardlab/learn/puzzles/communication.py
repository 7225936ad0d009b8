"""Communication between the puzzles' ranks: collectives, and one mailbox per rank.

The k-th collective calls of all ranks form one collective. A mailbox holds one message. Nothing is delivered while a
rank can continue. Once no rank can, one collective is completed, or else the mailboxes' earliest event in simulated
time happens. Results therefore do not depend on the order in which an event loop runs the ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from shardlab.common.errors import About, Refused, about_layer
from shardlab.common.text import listed
from shardlab.common.user_code import at_line
from shardlab.language import Holds, UserError
from shardlab.language.rules import arithmetic
from shardlab.language.values import Wait
from shardlab.learn.puzzles import values as rules
from shardlab.learn.puzzles.calls import AsyncioWatch, Blocked
from shardlab.learn.puzzles.values import PuzzleValue, WeightGrad


@dataclass(eq=False)
class Contribution(Blocked):
    """Contribution of one rank to a collective.

    Attributes:
        name: name of the collective, such as `allreduce`.
        layer, value: arguments of the call.
        time: simulated time at which the rank arrived.
        collective: the contributions of all ranks to the same collective, by rank (None: that rank has not arrived).
    """

    name: str
    layer: int
    value: Any
    time: float
    collective: dict[int, Contribution | None]

    def __str__(self) -> str:
        return f"{self.name}({self.value.spec if isinstance(self.value, PuzzleValue) else f'layer {self.layer}'})"

    def wait(self) -> Wait:
        missing = [rank for rank, part in self.collective.items() if part is None]
        names = ", ".join(map(str, missing))
        return Wait(f"{self} for rank{'s' * (len(missing) > 1)} {names}{at_line(self.line)}", missing)


class PuzzleCollectives:
    """Collectives of a run that are in progress."""

    def __init__(self, ranks: int) -> None:
        self._joined: Counter[int] = Counter()
        self._open: defaultdict[int, dict[int, Contribution | None]] = defaultdict(lambda: dict.fromkeys(range(ranks)))

    def next_of(self, rank: int) -> dict[int, Contribution | None]:
        """Return the first collective that this rank has not joined yet."""
        self._joined[rank] += 1
        return self._open[self._joined[rank]]

    def advance(self) -> bool:
        """Complete a collective that all ranks have joined, or refuse one with different calls.

        Returns:
            Whether there was such a collective.
        """
        for sequence_number, collective in self._open.items():
            parts = [part for part in collective.values() if part is not None]
            waiting_parts = [part for part in parts if not part.future.done()]
            complete = len(parts) == len(collective)
            if not waiting_parts or not (complete or any(part.name != parts[0].name for part in parts)):
                continue
            if complete:
                del self._open[sequence_number]
            try:
                results = combine(parts)
            except Exception as error:  # including errors of a student's objects
                for part in waiting_parts:
                    part.future.set_exception(error)
            else:
                time = max(part.time for part in parts)
                for part, result in zip(parts, results, strict=True):
                    part.go_on((result, time))
            return True
        return False


def combine(parts: list[Contribution]) -> list[Any]:
    """Return the result of a collective for each rank, given the contributions in rank order.

    Raises:
        Refused: if the calls or values do not match.
    """
    first, values = parts[0], [part.value for part in parts]
    op = about_layer(first.name, first.layer)
    other = next((part for part in parts if part.name != first.name), None)
    if other is not None:
        problem = f"rank {first.rank} meets with {first} and rank {other.rank} with {other}"
        raise Refused("other order", op, problem, "let all ranks call the same collectives in the same order")
    if not any(isinstance(value, PuzzleValue) for value in values):
        return _combine_objects(first, values)
    names = [f"rank {rank}" for rank in range(len(values))]
    specs = [rules.spec_of(op, f"value of {name}", value) for name, value in zip(names, values, strict=True)]
    op = specs[0].about(first.name)
    if first.name == "allgather":
        whole = rules.gather(op, specs, names)
        return [values[0].with_holds(whole.holds)] * len(values)
    total = arithmetic.add(op, specs, names)
    gradient: WeightGrad = values[0].with_microbatches(total)
    if first.name == "allreduce":
        return [gradient] * len(values)
    if not gradient.is_complete():
        raise Refused("partial", op, f"rank 0 gave {specs[0]}, which is partial", "sum and scatter whole gradients")
    return [gradient.with_holds(Holds(1 << rank, len(values))) for rank in range(len(values))]


@dataclass(eq=False)
class Message(Blocked):
    """Message in flight. When it enters the mailbox, `in_mailbox` becomes true and its sender continues.

    Attributes:
        to: receiving rank.
        value: the object that is sent.
        send_time: simulated time at which the message was sent.
        about: text of the object, for descriptions of the wait.
        in_mailbox: whether the message is in the receiver's mailbox.
    """

    to: int
    value: Any
    send_time: float
    about: str
    in_mailbox: bool = False

    def wait(self) -> Wait:
        text = f"pass_to(rank {self.to}) of {self.about}, whose mailbox is full, for rank {self.to}{at_line(self.line)}"
        return Wait(text, [self.to])


@dataclass(eq=False)
class Receiver(Blocked):
    """Rank that waits for a message from any rank, since the simulated time `since`."""

    since: float
    watch: AsyncioWatch

    def wait(self) -> Wait:
        """Return a description of the wait. Its blockers are the other ranks that wait, or all others if none waits."""
        others = [r for r in range(self.watch.ranks) if r != self.rank] or [self.rank]
        waiting_ranks, ended_ranks = self.watch.waiting_ranks(), [r for r in self.watch.ended_ranks() if r != self.rank]
        ended_text = f" (rank{'s' * (len(ended_ranks) > 1)} {listed(ended_ranks)} ended)" if ended_ranks else ""
        text = f"receive() for a message from any rank{ended_text}{at_line(self.line)}"
        return Wait(text, [r for r in others if r in waiting_ranks] or others)


class Mailboxes:
    """Messages in flight, and ranks that wait for a message."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.readers: list[Receiver] = []

    def advance(self) -> bool:
        """Process the earliest event: a message enters a mailbox, or a rank receives one. Returns False without events.

        A rank receives the message that was sent first. Of two messages sent at the same time, the one from the lower
        rank comes first.
        """
        messages = sorted(
            (message for message in self.messages if message.in_mailbox or not message.future.done()),
            key=lambda message: (message.send_time, message.rank),
        )
        first = {message.to: message for message in reversed(messages)}
        full = {message.to for message in messages if message.in_mailbox}
        reader = {reader.rank: reader for reader in reversed(self.readers) if not reader.future.done()}
        self.messages, self.readers = messages, [r for r in self.readers if not r.future.done()]
        events = [(message.send_time, 0, to) for to, message in first.items() if to not in full]
        events += [(max(first[to].send_time, reader[to].since), 1, to) for to in first.keys() & reader.keys()]
        if not events:
            return False
        _, is_received, to = min(events)
        message = first[to]
        if is_received:
            self.messages.remove(message)
            reader[to].go_on(message)
        message.in_mailbox = True
        message.go_on()
        return True


class PuzzleRun:
    """Run of a solution on all ranks."""

    def __init__(self, ranks: int) -> None:
        self.mail, self.collectives = Mailboxes(), PuzzleCollectives(ranks)
        self.watch = AsyncioWatch(ranks, lambda: self.collectives.advance() or self.mail.advance())
        self.members: set[int] = set()


class Dist:
    """Group of ranks: `Dist(4)` has four. It is reusable: a second `Model` of the same rank starts a new run.

    Attributes:
        ranks: number of ranks.
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise UserError(f"{total} ranks were asked for; give 1 or more")
        self.ranks = total
        self._run = PuzzleRun(total)

    def join(self, rank: int) -> PuzzleRun:
        """Return the run to which a new model of this rank belongs."""
        if rank in self._run.members:
            self._run = PuzzleRun(self.ranks)
        self._run.members.add(rank)
        return self._run


def _combine_objects(part: Contribution, values: list[Any]) -> list[Any]:
    """Combine objects that are not values of the puzzles, but can be added, combined or sharded."""
    try:
        if part.name == "allgather":
            return [reduce(lambda a, b: a.combine(b), values)] * len(values)
        total = reduce(add, values)
        if part.name == "allreduce":
            return [total] * len(values)
        return [total.shard(rank, len(values)) for rank in range(len(values))]
    except (TypeError, AttributeError) as error:
        about, problem = About(str(part), part.layer), f"these objects cannot be put together: {error}"
        raise Refused("no value", about, problem, "give values of the puzzles, or what can be added") from None
