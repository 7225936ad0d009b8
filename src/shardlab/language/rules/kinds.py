"""Vocabulary of the rules: kinds of value, dtypes, indices, factors, and bit sets of pieces.

`Kind` and `Reduction` name values and reductions. `INDICES` lists the indices along which parameters are cut, with the
noun for a piece and the way to make pieces whole. `Factor` is the factor of a scaled gradient: a rational number times
counts of tokens, which are known only when a step runs. `Holds`, with the functions after it, is a bit set of equal
pieces of a whole.
"""

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
    """Kind of a value. Its text is the name of the store that keeps such values."""

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

    __hash__ = object.__hash__  # an Enum's own hash is Python code, and kinds are dictionary keys in hot loops


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
"""Kinds whose pieces are rows of the batch. Pieces of all other kinds are slices of a layer's flat parameters, or for a
scalar, slices of all layers' parameters, concatenated."""


AUTOGRAD_KINDS = frozenset({Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""Kinds of the values that layers keep between passes. No program holds them."""


class Reduction(Enum):
    """Reduction of the members' values by REDUCE and ALL_REDUCE, element by element."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"

    __hash__ = object.__hash__  # as for `Kind`


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
"""Noun for a value of each kind, in messages."""


DTYPES = ("float64", "float32", "bfloat16", "float16")
"""Dtypes to which a value may be cast, by torch's names: every backend can communicate and add them."""


@cache
def bytes_of(dtype: str) -> float:
    """Return the bytes of an element, from the bits in the dtype's name.

    >>> bytes_of("bfloat16"), bytes_of("float4")
    (2.0, 0.5)
    """
    match = re.search(r"\d+", dtype)
    assert match is not None, f"{dtype} does not say its bits"
    return int(match[0]) / 8


class Index(NamedTuple):
    """Named index of tensors and parameters.

    Attributes:
        piece: noun for one piece of it.
        together: remedy for a message: how to make pieces whole.
        gathered: whether pieces may be gathered. Otherwise each rank keeps its pieces.
        exchanged: whether an all_to_all may exchange pieces of it for cells, and back.
        stacked: whether each piece has separate matrices. Otherwise pieces cut matrices.
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
    """Return the noun for one piece of an index."""
    entry = INDICES.get(index)
    return entry.piece if entry else index


MOST_DOUBLINGS = 64
"""Exponent of the largest power of 2 by which gradients may be multiplied or divided. float32 and bfloat16 allow 126
doublings in each direction."""

MOST_DOUBLINGS_IN_FLOAT16 = 8
"""Exponent of the largest power of 2 by which float16 gradients may be multiplied or divided. float16 allows 15
doublings and 14 halvings, and the loss scale needs most of them."""

MOST_BITS = 1024
"""Most bits of a factor's numerator or denominator, so that factors can be computed and printed."""

MOST_TOKEN_COUNTS = 4
"""Most token counts in a factor, numerator and denominator together."""

Tokens = tuple[tuple[int, int], ...]
"""For each count of tokens in a factor: (bit set of the microbatches whose tokens it counts, power of the count)."""


class Factor:
    """Product of a rational number and counts of tokens. Only `factor_of` makes factors, so equal factors are one
    object.

    >>> tokens = factor_of(1, ((0b11, 1),))
    >>> str(tokens / 2), tokens / tokens is ONE
    ('1/2 x tokens of microbatches 0-1', True)
    """

    __slots__ = ("ratio", "tokens")

    def __init__(self, ratio: Fraction, tokens: Tokens) -> None:
        self.ratio, self.tokens = ratio, tokens

    def why_out_of_range(self, max_doublings: int = MOST_DOUBLINGS) -> str:
        """Return why this factor is out of range, or "" if it is not.

        Args:
            max_doublings: the range is 2^-max_doublings to 2^max_doublings.
        """
        numerator_bits, denominator_bits = self.ratio.numerator.bit_length(), self.ratio.denominator.bit_length()
        if abs(numerator_bits - denominator_bits) > max_doublings:
            return f"about 2^{numerator_bits - denominator_bits}, beyond 2^-{max_doublings} and 2^{max_doublings}"
        if numerator_bits > MOST_BITS:
            return f"a ratio of numbers of {numerator_bits:,} bits, more than {MOST_BITS:,}"
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
        numerator = [_text(mask, power) for mask, power in self.tokens if power > 0]
        denominator = [_text(mask, -power) for mask, power in self.tokens if power < 0]
        ratio = [] if self.ratio == 1 and numerator else [str(self.ratio)]
        return " / ".join([" x ".join([*ratio, *numerator]), *denominator])

    __repr__ = __str__


_FACTORS: dict[tuple[Fraction, Tokens], Factor] = {}


def factor_of(ratio: Fraction | int, tokens: Tokens = ()) -> Factor:
    """Return the product of a nonzero rational number and powers of token counts, which may be in any order. Equal
    factors are one object.
    """
    powers: dict[int, int] = defaultdict(int)
    for mask, power in tokens:
        powers[mask] += power
    key = Fraction(ratio), tuple(sorted((mask, power) for mask, power in powers.items() if power))
    if key not in _FACTORS:
        _FACTORS[key] = Factor(*key)
    return _FACTORS[key]


ONE = factor_of(1)


MOST_SLICES = 1 << 20
"""Most slices of a layer or a batch, including slices of slices."""

MOST_PIECES = 1 << 26
"""Most pieces when slices of several sizes are refined to common pieces. A bit set of them takes 8 MB."""


class Holds(NamedTuple):
    """Set of equal pieces of a whole: piece i is bit i of `mask`, and the whole has `of` pieces.

    For weights, optimizer states and weight gradients the whole is the layer's flat parameters. For activations and
    their gradients it is the global batch, and a piece is a microbatch, or a slice of its sequences if the program cuts
    sequences: slice s of microbatch m is piece m * slices + s. For a scalar the whole is the parameters of all layers,
    and the pieces are those whose squared gradients are in the sum.
    """

    mask: int
    of: int

    @property
    def complete(self) -> bool:
        return self.mask == (1 << self.of) - 1

    @property
    def pieces(self) -> int:
        """Number of pieces in the set."""
        return self.mask.bit_count()

    def refined(self, of: int) -> Holds:
        """Return the same set, counted in `of` pieces, a multiple of the present number.

        Raises:
            Refused: for more than `MOST_PIECES` pieces.
        """
        if of > MOST_PIECES:
            fault = f"slices of {self.of:,} would be counted in {number_text(of)} pieces, to be compared with others"
            raise Refused("unknown slice", "", fault, "cut by numbers of which one divides the other")
        times = of // self.of
        if times == 1 or not self.mask:
            return Holds(self.mask, of)
        digits = f"{self.mask:b}".replace("0", "0" * times).replace("1", "1" * times)
        return Holds(int(digits, 2), of)  # as text: bit by bit would take time quadratic in their number

    def simplified(self) -> Holds:
        """Return the same set, counted in the largest possible pieces."""
        mask, of = self
        if mask == (1 << of) - 1:
            return WHOLE
        size = of
        for edge in bits(mask ^ mask << 1):  # a place where a run of pieces begins or ends
            size = math.gcd(size, edge)
            if size == 1:
                return self
        return Holds(mask_of({piece // size for piece in bits(mask)}), of // size)

    def __and__(self, other: Holds) -> Holds:
        """Return the parts of the whole that both sets have."""
        a, b = in_equal_pieces(self, other)
        return Holds(a.mask & b.mask, a.of)

    def __or__(self, other: Holds) -> Holds:
        """Return the parts of the whole that either set has."""
        a, b = in_equal_pieces(self, other)
        return Holds(a.mask | b.mask, a.of)

    def contains(self, other: Holds) -> bool:
        a, b = in_equal_pieces(self, other)
        return b.mask & ~a.mask == 0

    def equals(self, other: Holds) -> bool:
        a, b = in_equal_pieces(self, other)
        return a.mask == b.mask

    def around(self, of: int) -> Holds:
        """Return the smallest set of pieces, out of `of` equal pieces of the whole, that contains this set."""
        fine, _ = in_equal_pieces(self, Holds(0, of))
        return Holds(mask_of({piece * of // fine.of for piece in bits(fine.mask)}), of)

    def split(self, parts: int) -> Iterator[Holds]:
        """Yield `parts` equal slices of the set, in order."""
        fine = self.refined(self.of * parts // math.gcd(self.pieces, parts))
        places = list(bits(fine.mask))
        size = len(places) // parts
        return (Holds(mask_of(places[i * size : (i + 1) * size]), fine.of) for i in range(parts))

    @property
    def slices_text(self) -> str:
        """This set in words, such as `slices 0-1 of 4` or `all of the layer`."""
        return "all of the layer" if self.complete else f"{plural('slice', self.pieces)} {self}"

    def __str__(self) -> str:
        return f"{listed(bits(self.mask))} of {self.of}"


WHOLE = Holds(1, 1)


def in_equal_pieces(a: Holds, b: Holds) -> tuple[Holds, Holds]:
    """Return `a` and `b`, both counted in pieces of the same size."""
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
    """Return the bit set below `total` that repeats a pattern of `period` bits."""
    length = period
    while length < total:  # the pattern doubles each time: division of such long numbers takes far longer
        pattern |= pattern << length
        length *= 2
    return pattern & ((1 << total) - 1)


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers in a bit set, ascending."""
    digits = f"{mask:b}"[::-1] if mask > 0 else ""  # a tape from a file may have a negative mask
    place = digits.find("1")  # as text: removing bit after bit from a long number takes time quadratic in its length
    while place >= 0:
        yield place
        place = digits.find("1", place + 1)


def numbered(noun: str, mask: int) -> str:
    """Return text such as `slice 3` or `slices 0-2`."""
    return f"{plural(noun, mask.bit_count())} {listed(bits(mask))}"


def microbatches_text(mask: int) -> str:
    """Return text such as `microbatch 3` or `microbatches 0-2`."""
    return numbered("microbatch", mask)


def _text(mask: int, power: int) -> str:
    text = f"tokens of {microbatches_text(mask)}"
    return text if power == 1 else f"({text})^{power}"
