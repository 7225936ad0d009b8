"""Value numbers: equal numbers mean equal bits, because both values were computed alike from values with equal bits.

A number stands for a function of all positions (elements of a layer's parameters, cells of the batch); what a value
holds of it says its spec. So a slice has the number of its whole, and slices of one number are gathered into it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from shardlab.program import Holds, OpKind, Spec
from shardlab.program.ops import Combiner
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import common

Key = tuple[tuple[object, ...], tuple[int, ...]]
"""How a value was computed: what was done, and the numbers that it was done to."""

SUMS = frozenset(kind for kind in OpKind if kind.row.combines is Combiner.SUM)
"""What begins the key of a sum."""


class Numbers:
    """The numbers given so far.

    Attributes:
        keys: of every number, how its value was computed.
        pieces: of each number that was put together from others, which positions have which.
    """

    def __init__(self) -> None:
        self.keys: list[Key] = []
        self.pieces: dict[int, list[tuple[Holds, int]]] = {}
        self._number_of: dict[Key, int] = {}

    def of(self, what: tuple[object, ...], numbers: tuple[int, ...] = ()) -> int:
        """The number of what is computed in this way."""
        key = what, numbers
        number = self._number_of.get(key)
        if number is None:
            number = self._number_of[key] = len(self.keys)
            self.keys.append(key)
        return number

    def within(self, number: int, where: Holds) -> list[tuple[Holds, int]]:
        """The pieces that a number has at some positions."""
        pieces = self.pieces.get(number)
        if pieces is None:
            return [(where, number)]
        met = [(overlap(where, at), piece) for at, piece in pieces]
        return [(at, piece) for at, piece in met if at.mask]

    def joined(self, parts: Iterable[tuple[Holds, int]]) -> int:
        """The number of values laid side by side."""
        whole: dict[int, Holds] = {}
        for where, number in parts:
            for at, piece in self.within(number, where):
                mine, theirs = common(whole.get(piece, Holds(0, 1)), at)
                whole[piece] = Holds(mine.mask | theirs.mask, mine.of)
        if len(whole) == 1:
            return next(iter(whole))
        pieces = [(whole[piece].simplified(), piece) for piece in sorted(whole)]
        number = self.of(("pieces", *(at for at, _ in pieces)), tuple(piece for _, piece in pieces))
        self.pieces[number] = pieces
        return number

    def at(self, number: int, where: Holds) -> int:
        """The number of a slice."""
        return self.joined([(where, number)]) if number in self.pieces else number

    def element_wise(self, made: Callable[[Sequence[int]], int], numbers: Sequence[int], where: Holds) -> int:
        """The number of what is made element by element of values; `made` takes those of one piece."""
        if self.pieces.keys().isdisjoint(numbers):
            return made(numbers)
        cuts = [where]
        for number in numbers:
            cuts = [at for cut in cuts for at, _ in self.within(number, cut)]
        return self.joined([(cut, made([self.at(number, cut) for number in numbers])) for cut in cuts])

    def of_all(self, what: tuple[object, ...], numbers: Sequence[int]) -> int:
        """Number what an op makes of `numbers`; with `what` bound, a rule for `element_wise`."""
        return self.of(what, tuple(numbers))

    def sum(self, numbers: Sequence[int]) -> int:
        """The sum of two values, which is the same in either order."""
        one, other = numbers
        return self.of((OpKind.ADD,), (one, other) if one < other else (other, one))

    def terms(self, number: int) -> list[int]:
        """Get what was added up, in whatever order."""
        left, found = [number], list[int]()
        while left:
            what, numbers = self.keys[number := left.pop()]
            left.extend(numbers) if what[0] in SUMS else found.append(number)
        return sorted(found)


def positions(spec: Spec) -> Holds:
    """Positions at which a value has elements: cells of the batch, or slices of a layer's flat parameters."""
    form, cells, _ = spec
    return Holds(cells, form.space.cells) if form.kind in ROW_KINDS else form.holds


def overlap(one: Holds, other: Holds) -> Holds:
    """Find what both hold."""
    mine, theirs = common(one, other)
    return Holds(mine.mask & theirs.mask, mine.of)
