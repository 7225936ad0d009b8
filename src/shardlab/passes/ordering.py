"""A new order for one tape: some ops are wished elsewhere, and what depends on them, or they on, goes along."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.check.dependence import Dependences
from shardlab.program import Op, OpKind
from shardlab.program.pass_names import Ahead

FREE, WAIT = OpKind.FREE, OpKind.WAIT

LIGHT = frozenset({OpKind.ADD, OpKind.SCALE, OpKind.CAST, OpKind.SLICE, OpKind.CONCATENATE, OpKind.NORM})
"""Ops that follow what is moved, as reloads follow what starts earlier. Others stay, and hold back what they need."""


class Ordering:
    """Wishes for one tape. Ops that nobody moves stay in their order.

    Args:
        needs: what must come before what on it.

    Attributes:
        needs: as given.
        rank: whose tape it is.
    """

    def __init__(self, needs: Dependences) -> None:
        self.needs = needs
        self.rank = needs.rank
        self._tape = needs.tape
        self._places = _places(self._tape)
        reloads = [at for at, op in enumerate(self._tape) if op.kind is OpKind.RELOAD]
        light = (at for at, op in enumerate(self._tape) if op.kind in LIGHT)
        self._follows = {*light, *reloads, *map(needs.over, reloads)}
        self._raised: dict[int, float] = {}
        self._sunk: dict[int, float] = {}

    def start_before(self, at: int, other: int) -> None:
        """Have an op start before another, or as soon afterwards as what it needs is there."""
        self._raise(at, self._places[max(0, other)] - 0.5)

    def start_at_once(self, *together: int) -> None:
        """Have ops start as soon as what they need is there; what follows them comes with them, and no earlier."""
        place = max(map(self._ready, together))
        for at in together:
            self._raise(at, place)

    def end_before(self, at: int, other: int) -> None:
        """Have an op go down to just before another (the tape's length: to the end), or to the first that needs it."""
        self._sunk[at] = len(self._tape) if other >= len(self._tape) else self._places[other] - 0.5

    def start_ahead(self, starts: Sequence[int], ahead: int | Ahead) -> None:
        """Have communications start so many uses of what they bring ahead, and be awaited just before their own use."""
        ahead, but = (ahead.number, ahead.but) if isinstance(ahead, Ahead) else (ahead, frozenset[int]())
        brought = [self.needs.readers[self._tape[at].outputs[0]] for at in starts]
        uses = [min(readers, default=at) for at, readers in zip(starts, brought, strict=True)]
        for number, (at, use) in enumerate(zip(starts, uses, strict=True)):
            if number in but:
                continue
            self.start_before(at, uses[number - ahead] if number >= ahead else starts[0])
            if use > at:
                self.end_before(self.needs.over(at), use)

    def _raise(self, at: int, place: float) -> None:
        if place < self._raised.get(at, self._places[at]):
            self._raised[at] = place
            for other in self.needs.before[at]:
                if other in self._follows:
                    self._raise(other, place)

    def _ready(self, at: int) -> float:
        """Where the last of what an op needs is, but for what follows it."""
        needed = self.needs.before[at]
        return max((self._ready(each) if each in self._follows else self._place(each) for each in needed), default=-1.0)

    def tape(self) -> list[Op]:
        """The tape in its new order."""
        if not self._raised and not self._sunk:
            return list(self._tape)
        tape, before, after = self._tape, self.needs.before, self.needs.after
        latest = [float(len(tape))] * len(tape)  # where each op is needed
        for at in reversed(range(len(tape))):
            for other in after[at]:
                follows = tape[other].kind in LIGHT or tape[other].kind is FREE or other in self._sunk
                latest[at] = min(latest[at], latest[other] if follows else self._place(other))
        places: list[float] = []
        for at, op in enumerate(tape):
            there = max((places[other] for other in before[at]), default=-1.0)
            if op.kind is FREE:
                place = there
            elif at in self._sunk:
                place = max(there, min(self._sunk[at], latest[at]))
            else:
                place = max(there, self._place(at))
            places.append(place)
        return [tape[at] for at in sorted(range(len(tape)), key=lambda at: (places[at], at))]

    def _place(self, at: int) -> float:
        return self._raised.get(at, self._places[at])


def _places(tape: Sequence[Op]) -> list[float]:
    """Where each op stands: what is issued together, at its first op's place, so that nothing comes between."""
    places: list[float] = []
    for at, op in enumerate(tape):
        together = op.batch >= 0 and at > 0 and tape[at - 1].batch == op.batch
        places.append(places[-1] if together else float(at))
    return places
