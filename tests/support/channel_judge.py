"""A second opinion on channel models: ranks and channels take their steps in random order until nothing can move.

It is written from the models' definitions alone, handles one communication at a time, and has no bookkeeping for speed.
Its verdict on a program must not depend on the random order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from random import Random

from shardlab.check import ChannelModel
from shardlab.language import Op, OpKind, Program
from shardlab.language.ops import COMMUNICATION

QUEUES = (ChannelModel.QUEUED_PER_PAIR, ChannelModel.QUEUED)


@dataclass(frozen=True)
class Part:
    """One rank's part in a communication."""

    rank: int
    op: Op


class Chance:
    """Executes the communication of a program in random order, under one channel model."""

    def __init__(self, program: Program, model: ChannelModel, random: Random) -> None:
        self.tapes = [
            [op for op in tape if op.kind in COMMUNICATION or op.kind is OpKind.WAIT] for tape in program.tapes
        ]
        self.model = model
        self.random = random
        self.at = [0] * len(self.tapes)
        self.issued: list[Part] = []
        self.completed: set[tuple[int, int]] = set()
        self.communicators: set[Hashable] = set()

    def hangs(self) -> bool:
        """Whether a rank does not reach the end of its tape."""
        while True:
            steps = [self._advance(rank) for rank in range(len(self.tapes)) if self._can_advance(rank)]
            steps += [self._complete(parts) for parts in self._ready()]
            if not steps:
                return any(at < len(tape) for at, tape in zip(self.at, self.tapes, strict=True))
            self.random.choice(steps)()

    def _can_advance(self, rank: int) -> bool:
        if self.at[rank] == len(self.tapes[rank]):
            return False
        op = self.tapes[rank][self.at[rank]]
        if op.kind is OpKind.WAIT:
            issued = next(other for other in self.tapes[rank] if other.handle == op.handle)
            together = [o.handle for o in self.tapes[rank] if o.batch >= 0 and o.batch == issued.batch]
            handles = together if together and self.model in QUEUES else [op.handle]  # NCCL waits for a whole group
            return all((rank, handle) in self.completed for handle in handles)
        return self.model is not ChannelModel.QUEUED_PER_PAIR or op.batch >= 0 or self._is_made(Part(rank, op))

    def _is_made(self, part: Part) -> bool:
        """Whether a communicator exists: it was used before, or all of its ranks are about to use it."""
        communicator = _communicator(part)
        if communicator in self.communicators:
            return True
        ranks = part.op.group.ranks if part.op.group is not None else (part.rank, part.op.peer)
        return all(self._next_communicator(rank) == communicator for rank in ranks)

    def _next_communicator(self, rank: int) -> Hashable:
        """Return the communicator of a rank's next op, if that op communicates."""
        rest = self.tapes[rank][self.at[rank] :]
        return _communicator(Part(rank, rest[0])) if rest and rest[0].kind is not OpKind.WAIT else None

    def _advance(self, rank: int) -> Callable[[], None]:
        def step() -> None:
            op = self.tapes[rank][self.at[rank]]
            self.at[rank] += 1
            if op.kind is not OpKind.WAIT:
                self.communicators.add(_communicator(Part(rank, op)))
                self.issued.append(Part(rank, op))
                if op.kind is OpKind.SEND and self.model in (ChannelModel.BUFFERED, ChannelModel.IN_ORDER):
                    self.completed.add((rank, op.handle))  # the channel has taken it

        return step

    def _complete(self, parts: list[Part]) -> Callable[[], None]:
        def step() -> None:
            for part in parts:
                self.completed.add((part.rank, part.op.handle))
                self.issued.remove(part)

        return step

    def _ready(self) -> list[list[Part]]:
        """Communications whose parts are all issued, and that the model lets run now."""
        ready: list[list[Part]] = []
        for parts in self._matched():
            together = self.model is ChannelModel.QUEUED or len({_communicator(part) for part in parts}) == 1
            if self.model not in QUEUES or (together and all(map(self._at_head, parts))):
                ready.append(parts)
        return ready

    def _matched(self) -> list[list[Part]]:
        """The first pending parts that match each other; completed parts are no longer in the queues."""
        firsts: dict[Hashable, dict[int, Part]] = defaultdict(dict)
        sizes: dict[Hashable, int] = {}
        for part in self.issued:
            op = part.op
            if op.group is not None:
                key: Hashable = op.group
                sizes[key] = len(op.group.ranks)
            else:
                key = (part.rank, op.peer) if op.kind is OpKind.SEND else (op.peer, part.rank)
                sizes[key] = 2
            firsts[key].setdefault(part.rank, part)
        return [list(parts.values()) for key, parts in firsts.items() if len(parts) == sizes[key]]

    def _at_head(self, part: Part) -> bool:
        """Whether all earlier parts of this rank in the same queue are complete, apart from those of the same batch."""
        for other in self.issued:
            if other is part:
                return True
            one_queue = self.model is ChannelModel.QUEUED or _communicator(other) == _communicator(part)
            if other.rank == part.rank and one_queue and (part.op.batch < 0 or other.op.batch != part.op.batch):
                return False
        raise AssertionError("the part is among those issued")


def _communicator(part: Part) -> Hashable:
    if part.op.batch >= 0:
        return "exchanges"
    return part.op.group or frozenset({part.rank, part.op.peer})


def hangs(program: Program, model: ChannelModel, seed: int) -> bool:
    """Whether a program that passes the dataflow check hangs under a channel model."""
    return Chance(program, model, Random(seed)).hangs()
