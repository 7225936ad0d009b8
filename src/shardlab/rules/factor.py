"""Factors that values are multiplied by: a rational, and counts of tokens that are known only when a step runs."""

from __future__ import annotations

from collections import defaultdict
from fractions import Fraction

from shardlab.rules.pieces import microbatches_text

MOST_DOUBLINGS = 64
"""By how many powers of 2 gradients may be multiplied or divided: float32 and bfloat16 have 126 either way."""

MOST_DOUBLINGS_IN_FLOAT16 = 8
"""The same of float16, which has 15 and 14, and needs most of them for a loss scale."""

MOST_BITS = 1024
"""Bits of a factor's numerator and denominator at most: numbers that can be computed with, and said."""

MOST_TOKEN_COUNTS = 4
"""How many counts of tokens may multiply and divide a gradient."""

Tokens = tuple[tuple[int, int], ...]
"""(microbatches as a bit set, power): how often the number of their tokens is multiplied (below 0: divided by)."""


class Factor:
    """A product of a rational and token counts. Made by `factor_of` alone: equal factors are one object.

    >>> tokens = factor_of(1, ((0b11, 1),))
    >>> str(tokens / 2), tokens / tokens is ONE
    ('1/2 x tokens of microbatches 0-1', True)
    """

    __slots__ = ("ratio", "tokens")

    def __init__(self, ratio: Fraction, tokens: Tokens) -> None:
        self.ratio, self.tokens = ratio, tokens

    def beyond(self, most: int = MOST_DOUBLINGS) -> str:
        """Say why numbers that may be doubled or halved so often have no room for this; nothing if they have."""
        above, below = self.ratio.numerator.bit_length(), self.ratio.denominator.bit_length()
        if abs(above - below) > most:
            return f"about 2^{above - below}, beyond 2^-{most} and 2^{most}"
        if above > MOST_BITS:
            return f"a ratio of numbers of {above:,} bits, more than {MOST_BITS:,}"
        counts = sum(abs(power) for _, power in self.tokens)
        return "" if counts <= MOST_TOKEN_COUNTS else f"{counts} counts of tokens, more than {MOST_TOKEN_COUNTS}"

    def __mul__(self, other: Factor | Fraction | int) -> Factor:
        ratio, tokens = (other.ratio, other.tokens) if isinstance(other, Factor) else (other, ())
        return factor_of(self.ratio * ratio, (*self.tokens, *tokens))

    def __truediv__(self, other: Factor | Fraction | int) -> Factor:
        inverse = other if isinstance(other, Factor) else factor_of(other)
        return self * factor_of(1 / inverse.ratio, tuple([(mask, -power) for mask, power in inverse.tokens]))

    def __rtruediv__(self, other: Fraction | int) -> Factor:
        return factor_of(other) / self

    __rmul__ = __mul__

    def __reduce__(self) -> tuple[object, ...]:
        return factor_of, (self.ratio, self.tokens)

    def __str__(self) -> str:
        above = [_text(mask, power) for mask, power in self.tokens if power > 0]
        below = [_text(mask, -power) for mask, power in self.tokens if power < 0]
        ratio = [] if self.ratio == 1 and above else [str(self.ratio)]
        return " / ".join([" x ".join([*ratio, *above]), *below])

    __repr__ = __str__


def _text(mask: int, power: int) -> str:
    text = f"tokens of {microbatches_text(mask)}"
    return text if power == 1 else f"({text})^{power}"


_FACTORS: dict[tuple[Fraction, Tokens], Factor] = {}


def factor_of(ratio: Fraction | int, tokens: Tokens = ()) -> Factor:
    """The one factor of a rational that is not zero and powers of token counts, in any order."""
    powers: dict[int, int] = defaultdict(int)
    for mask, power in tokens:
        powers[mask] += power
    key = Fraction(ratio), tuple(sorted((mask, power) for mask, power in powers.items() if power))
    if key not in _FACTORS:
        _FACTORS[key] = Factor(*key)
    return _FACTORS[key]


ONE = factor_of(1)
