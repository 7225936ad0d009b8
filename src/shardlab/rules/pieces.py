"""Bit sets of numbers, and the equal pieces of a whole that one of them tells."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from shardlab.errors import Refused

MOST_SLICES = 1 << 20
"""Slices of a layer or a batch at most, slices of slices counted together."""

MOST_PIECES = 1 << 26
"""Pieces at most in which slices of several sizes are counted; a bit set of them takes 8 MB."""


class Holds(NamedTuple):
    """Which of `of` equal pieces of the whole a value contains: piece i is bit i of `mask`.

    For weights, optimizer states and weight gradients the whole is the layer's flat parameters; for activations and
    their gradients it is the global batch, and a piece is a microbatch, or one of the equal slices into which a
    tensor-parallel program cuts every sequence: slice s of microbatch m is piece m * slices + s. For a scalar it is
    the parameters of all layers, and held are those whose gradient's squares are in the sum.
    """

    mask: int
    of: int

    @property
    def complete(self) -> bool:
        return self.mask == (1 << self.of) - 1

    @property
    def pieces(self) -> int:
        """How many pieces are held."""
        return self.mask.bit_count()

    def refined(self, of: int) -> Holds:
        """Count the same slices in `of` pieces (a multiple of the present number).

        Raises:
            Refused: for more pieces than are counted.
        """
        if of > MOST_PIECES:
            given = f"slices of {self.of:,} would be counted in {number_text(of)} pieces, to be compared with others"
            raise Refused("unknown slice", "", given, "cut by numbers of which one divides the other")
        times = of // self.of
        if times == 1 or not self.mask:
            return Holds(self.mask, of)
        digits = f"{self.mask:b}".replace("0", "0" * times).replace("1", "1" * times)
        return Holds(int(digits, 2), of)  # as text, for each of many pieces alone would take the square of their number

    def simplified(self) -> Holds:
        """Count the same slices in pieces as large as can be."""
        mask, of = self
        if mask == (1 << of) - 1:
            return WHOLE
        size = of
        for edge in bits(mask ^ mask << 1):  # where a run of pieces begins or ends
            size = math.gcd(size, edge)
            if size == 1:
                return self
        return Holds(mask_of({piece // size for piece in bits(mask)}), of // size)

    def contains(self, other: Holds) -> bool:
        mine, theirs = common(self, other)
        return theirs.mask & ~mine.mask == 0

    def same(self, other: Holds) -> bool:
        mine, theirs = common(self, other)
        return mine.mask == theirs.mask

    def around(self, of: int) -> Holds:
        """Those of `of` equal pieces of the whole that it has any of."""
        fine, _ = common(self, Holds(0, of))
        return Holds(mask_of({piece * of // fine.of for piece in bits(fine.mask)}), of)

    def split(self, parts: int) -> Iterator[Holds]:
        """Cut what is held into `parts` equal slices, in order, each when it is asked for."""
        fine = self.refined(self.of * parts // math.gcd(self.pieces, parts))
        places = list(bits(fine.mask))
        size = len(places) // parts
        return (Holds(mask_of(places[i * size : (i + 1) * size]), fine.of) for i in range(parts))

    def __str__(self) -> str:
        return f"{listed(bits(self.mask))} of {self.of}"


WHOLE = Holds(1, 1)


def common(a: Holds, b: Holds) -> tuple[Holds, Holds]:
    """`a` and `b`, counted in pieces of one size."""
    if a.of == b.of:
        return a, b
    of = math.lcm(a.of, b.of)
    return a.refined(of), b.refined(of)


def mask_of(numbers: Iterable[int]) -> int:
    """The bit set of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


@cache
def repeated(pattern: int, period: int, total: int) -> int:
    """A bit set of numbers below `total` that repeats a pattern."""
    length = period
    while length < total:  # doubled each time: a division of such long numbers takes far longer
        pattern |= pattern << length
        length *= 2
    return pattern & ((1 << total) - 1)


def bits(mask: int) -> Iterator[int]:
    """The numbers in a bit set, ascending."""
    digits = f"{mask:b}"[::-1] if mask > 0 else ""  # a tape from a file may say anything
    place = digits.find("1")  # as text: taking bit after bit out of a long number takes the square of its length
    while place >= 0:
        yield place
        place = digits.find("1", place + 1)


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a reader writes them: `0-3, 7`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def number_text(number: int) -> str:
    """A whole number, by its digits if they can be read.

    >>> number_text(12_000), number_text(10**400)
    ('12,000', 'about 2^1328')
    """
    return f"{number:,}" if abs(number) < 10**15 else f"about {'-' * (number < 0)}2^{abs(number).bit_length() - 1}"


def plural(noun: str, count: int) -> str:
    """`microbatch` or `microbatches`."""
    return noun if count == 1 else f"{noun}{'es' if noun.endswith('ch') else 's'}"


def counted(count: int, noun: str) -> str:
    """`1 microbatch` or `2 microbatches`."""
    return f"{count:,} {plural(noun, count)}"


def numbered(noun: str, mask: int) -> str:
    """`slice 3` or `slices 0-2`."""
    return f"{plural(noun, mask.bit_count())} {listed(bits(mask))}"


def microbatches_text(mask: int) -> str:
    """`microbatch 3` or `microbatches 0-2`."""
    return numbered("microbatch", mask)
