"""The kinds of value, and what is taken of several ranks' values."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from enum import Enum
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from shardlab.common.errors import Refused
from shardlab.common.text import listed, number_text, plural


class Kind(Enum):
    """The kinds of value; a kind's text is the name of the store that keeps it."""

    WEIGHT = "weights"
    OPT_STATE = "opt_states"
    ACTIVATION = "activations"
    GRAD_ACTIVATION = "grad_activations"
    GRAD_WEIGHT = "grad_weights"
    DIRECTION = "directions"
    RESIDUAL = "residuals"
    GRAD_RESIDUAL = "grad_residuals"
    ROUTING = "routing"
    GRAD_ROUTING = "grad_routing"
    STATS = "stats"
    QUERIES = "queries"
    KEYS_VALUES = "keys_values"
    GRAD_QUERIES = "grad_queries"
    GRAD_KEYS_VALUES = "grad_keys_values"
    SCALAR = "scalars"
    SAVED = "saved"
    SAVED_FOR_WEIGHT = "saved_for_weight"

    __hash__ = object.__hash__  # an Enum's own hash is Python code, and kinds are dictionary keys on the hot path


ROW_KINDS = frozenset(
    {
        Kind.ACTIVATION,
        Kind.GRAD_ACTIVATION,
        Kind.RESIDUAL,
        Kind.GRAD_RESIDUAL,
        Kind.ROUTING,
        Kind.GRAD_ROUTING,
        Kind.STATS,
        Kind.QUERIES,
        Kind.KEYS_VALUES,
        Kind.GRAD_QUERIES,
        Kind.GRAD_KEYS_VALUES,
        Kind.SAVED,
        Kind.SAVED_FOR_WEIGHT,
    }
)
"""Kinds whose pieces are batch rows; the pieces of the others are slices of a layer's flat parameters (of a scalar,
of all layers' one after the other)."""


AUTOGRAD_KINDS = frozenset({Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""What layers keep between passes; no program holds it."""


class Reduction(Enum):
    """What REDUCE and ALL_REDUCE make of the members' values, element by element."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    __hash__ = object.__hash__  # as of kinds


KIND_NOUNS = {
    Kind.ACTIVATION: "activation",
    Kind.RESIDUAL: "residual",
    Kind.ROUTING: "routing",
    Kind.QUERIES: "queries",
    Kind.KEYS_VALUES: "keys and values",
    Kind.GRAD_ACTIVATION: "gradient",
    Kind.GRAD_RESIDUAL: "residual's gradient",
    Kind.GRAD_ROUTING: "routing's gradient",
    Kind.GRAD_QUERIES: "gradient of queries",
    Kind.GRAD_KEYS_VALUES: "gradient of keys and values",
}
"""What messages call values of a kind."""


# Numbers that values may be in, by torch's names.


DTYPES = ("float64", "float32", "bfloat16", "float16")
"""What a value may be cast to: numbers that every backend moves and adds."""


def bytes_of(dtype: str) -> float:
    """Bytes of an element, which a dtype's name says.

    >>> bytes_of("bfloat16"), bytes_of("float4")
    (2.0, 0.5)
    """
    found = re.search(r"\d+", dtype)
    assert found is not None, f"{dtype} does not say its bits"
    return int(found[0]) / 8


# The indices along which parameters are cut: what a piece is called, and how pieces become whole.


class Index(NamedTuple):
    """An index of tensors and parameters.

    Attributes:
        piece: what a reader calls one piece of it.
        together: how what is cut along it becomes whole, as advice.
        gathered: whether pieces lie side by side and may be gathered; otherwise each rank keeps its own.
        exchanged: whether pieces may be dealt to other ranks while cells are put together, and back.
        stacked: whether each piece has matrices of its own; others cut matrices.
    """

    piece: str
    together: str
    gathered: bool = False
    exchanged: bool = False
    stacked: bool = False


INDICES = {
    "ffn": Index("feed-forward slice", "all_gather the slices, which lie side by side", gathered=True),
    "width": Index("feature slice", "all_gather the slices, which lie side by side", gathered=True),
    "vocab": Index("vocabulary slice", "all_gather the slices, which lie side by side", gathered=True),
    "head": Index(
        "head slice", "heads stay where they are, since attention and the layer after it take their own", exchanged=True
    ),
    "expert": Index("expert", "exchange the experts' buffers by all_to_all", exchanged=True, stacked=True),
}
"""Every index along which parameters may be cut."""


def piece_noun(index: str) -> str:
    """What a reader calls one piece of an index."""
    known = INDICES.get(index)
    return known.piece if known else index


# Factors that values are multiplied by: a rational, and counts of tokens that are known only when a step runs.


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
    """Return the one factor of a rational that is not zero and powers of token counts, in any order."""
    powers: dict[int, int] = defaultdict(int)
    for mask, power in tokens:
        powers[mask] += power
    key = Fraction(ratio), tuple(sorted((mask, power) for mask, power in powers.items() if power))
    if key not in _FACTORS:
        _FACTORS[key] = Factor(*key)
    return _FACTORS[key]


ONE = factor_of(1)


# Bit sets of numbers, and the equal pieces of a whole that one of them tells.


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
        mine, theirs = in_equal_pieces(self, other)
        return theirs.mask & ~mine.mask == 0

    def same(self, other: Holds) -> bool:
        mine, theirs = in_equal_pieces(self, other)
        return mine.mask == theirs.mask

    def around(self, of: int) -> Holds:
        """Return those of `of` equal pieces of the whole that it has any of."""
        fine, _ = in_equal_pieces(self, Holds(0, of))
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


def in_equal_pieces(a: Holds, b: Holds) -> tuple[Holds, Holds]:
    """`a` and `b`, counted in pieces of one size."""
    if a.of == b.of:
        return a, b
    of = math.lcm(a.of, b.of)
    return a.refined(of), b.refined(of)


def mask_of(numbers: Iterable[int]) -> int:
    """Return the bit set of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


@cache
def repeat_pattern(pattern: int, period: int, total: int) -> int:
    """Return a bit set of numbers below `total` that repeats a pattern."""
    length = period
    while length < total:  # doubled each time: a division of such long numbers takes far longer
        pattern |= pattern << length
        length *= 2
    return pattern & ((1 << total) - 1)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers in a bit set, ascending."""
    digits = f"{mask:b}"[::-1] if mask > 0 else ""  # a tape from a file may say anything
    place = digits.find("1")  # as text: taking bit after bit out of a long number takes the square of its length
    while place >= 0:
        yield place
        place = digits.find("1", place + 1)


def numbered(noun: str, mask: int) -> str:
    """Return text such as `slice 3` or `slices 0-2`."""
    return f"{plural(noun, mask.bit_count())} {listed(bits(mask))}"


def microbatches_text(mask: int) -> str:
    """Return text such as `microbatch 3` or `microbatches 0-2`."""
    return numbered("microbatch", mask)
