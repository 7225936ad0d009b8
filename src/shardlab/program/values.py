"""What a value is: its kind, its layer, and the two sets *holds* and *sums* from which every rule follows.

A value carries a `Spec`, never data. *holds* says which slices of the whole it contains, *sums* which
contributions have been added into it. Both are bit sets in Python integers, so that uniting and comparing
them is one machine operation for any usual number of microbatches and shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cache
from typing import NamedTuple


class Kind(Enum):
    """The kinds of value; a kind's text is the name of the store that keeps it."""

    WEIGHT = "weights"
    OPT_STATE = "opt_states"
    ACTIVATION = "activations"
    GRAD_ACTIVATION = "grad_activations"
    GRAD_WEIGHT = "grad_weights"
    RESIDUAL = "residuals"
    GRAD_RESIDUAL = "grad_residuals"
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


class Reduction(Enum):
    """What REDUCE and ALL_REDUCE make of the members' values, element by element."""

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"


AUTOGRAD_KINDS = frozenset({Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""What autograd keeps between passes; no program holds it."""


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
        """The same slices, counted in `of` pieces (a multiple of the present number)."""
        times = of // self.of
        if times == 1 or not self.mask:
            return Holds(self.mask, of)
        digits = f"{self.mask:b}".replace("0", "0" * times).replace("1", "1" * times)
        return Holds(int(digits, 2), of)  # as text, for each of many pieces alone would take the square of their number

    def simplified(self) -> Holds:
        """The same slices, counted in pieces as large as can be."""
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

    def split_sequences(self, parts: int, slices: int) -> list[Holds]:
        """Cut every sequence held, of so many slices, into `parts` equal runs, in order; too few slices give none."""
        held: dict[int, list[int]] = {}
        for piece in bits(self.mask):
            held.setdefault(piece // slices, []).append(piece)
        if any(len(pieces) % parts for pieces in held.values()):
            return []
        return [
            Holds(
                mask_of(
                    piece
                    for pieces in held.values()
                    for piece in pieces[i * len(pieces) // parts : (i + 1) * len(pieces) // parts]
                ),
                self.of,
            )
            for i in range(parts)
        ]

    def split(self, parts: int) -> Iterator[Holds]:
        """Cut what is held into `parts` equal slices, in order, each when it is asked for."""
        fine = self.refined(self.of * parts // math.gcd(self.pieces, parts))
        places = list(bits(fine.mask))
        size = len(places) // parts
        return (Holds(mask_of(places[i * size : (i + 1) * size]), fine.of) for i in range(parts))

    def __str__(self) -> str:
        return f"{listed(bits(self.mask))} of {self.of}"


WHOLE = Holds(1, 1)


class Grid(NamedTuple):
    """In what a program counts.

    Attributes:
        sequence: slices of every sequence.
        width: slices of the parameters of a sliced layer.
        tied: pieces of the batch, if the head is tied to the embedding: a gradient of layer 0 then has bit p set when
            piece p has been added in as the embedding, and bit tied + p when it has been as the head (0: not tied).
    """

    sequence: int
    width: int
    tied: int = 0


ONE = Grid(1, 1)
"""A program without tensor parallelism."""


def common(a: Holds, b: Holds) -> tuple[Holds, Holds]:
    """Both, counted in pieces of one size."""
    if a.of == b.of:
        return a, b
    of = math.lcm(a.of, b.of)
    return a.refined(of), b.refined(of)


class Spec(NamedTuple):
    """What is known of a value.

    `layer` is the layer's number for weights and what belongs to them; activation l enters layer l, and the
    gradient of activation l has the number l too. `step` is the optimizer step that the value belongs to, counted
    from this tape's first: a weight loaded is of step 0, the one that UPDATE makes is of step 1.
    `sums` of a weight gradient has bit p set when piece p of the batch has been added in. Of an activation or its
    gradient it is 0 when it is complete; otherwise bit t says that the term of a sliced layer's slice t is in it (where
    slices lie side by side, that slice t is there, see `sizes.side_by_side`; of experts' buffers, that those of the
    experts in slice t are, and no others').
    Of what attention has done only in part, the bits from `grid.width` on say which slices of the sequence have come
    in (see `shardlab.program.attention`). Of a scalar it is 0, a sum of squares, or the place in `Reduction` of what
    was taken of the ranks' scalars instead. `grid` says what a slice is.
    """

    kind: Kind
    layer: int
    holds: Holds
    sums: int = 0
    step: int = 0
    grid: Grid = ONE

    @property
    def pieces(self) -> int:
        """The pieces of the batch that this value is about, as a bit set (0 for weights and optimizer states)."""
        if self.kind in ROW_KINDS:
            return self.holds.mask
        if self.kind is Kind.SCALAR:
            return 0
        tied = self.grid.tied
        return self.sums if not tied else self.sums & ((1 << tied) - 1) | self.sums >> tied

    @property
    def parts(self) -> int:
        """The slices of sliced layers that are in it, as a bit set (0: all)."""
        return self.sums & ((1 << self.grid.width) - 1)

    @property
    def microbatches(self) -> int:
        """The microbatches that this value is about, or parts of them, as a bit set."""
        slices = self.grid.sequence
        return self.pieces if slices == 1 else mask_of({piece // slices for piece in bits(self.pieces)})

    @property
    def whole_sequences(self) -> bool:
        """Whether it holds all of each microbatch that it holds anything of."""
        slices = self.grid.sequence
        if slices == 1:
            return True
        firsts = self.holds.mask & repeated(1, slices, self.holds.of)
        return firsts * ((1 << slices) - 1) == self.holds.mask

    def __str__(self) -> str:
        parts: list[str] = []
        if self.kind in ROW_KINDS:
            parts.append(pieces_text(self.holds.mask, self.grid))
            if self.parts:
                parts.append(f"slices {listed(bits(self.parts))} of {self.grid.width} alone")
            if met := self.sums >> self.grid.width:
                parts.append(f"{_MET.get(self.kind, 'blocks')} {listed(bits(met))} of {self.grid.sequence} alone")
        elif self.kind is Kind.GRAD_WEIGHT:
            parts.append(pieces_text(self.sums, self.grid) if self.sums else "zero")
        if self.kind not in ROW_KINDS and not self.holds.complete:
            parts.append(f"shard {self.holds}" if self.kind is not Kind.SCALAR else f"parts {self.holds} of the model")
        if self.kind is Kind.SCALAR and self.sums:
            parts.append(f"the {list(Reduction)[self.sums].value} of several ranks'")
        if self.step:
            parts.append(f"step {self.step}")
        name = "scalars" if self.kind is Kind.SCALAR else f"{self.kind.value}[{self.layer}]"
        return name + (f" ({', '.join(parts)})" if parts else "")


_MET = {Kind.GRAD_KEYS_VALUES: "from queries"}
"""What the slices that it has met are to a value; to all others they are blocks of keys and values."""


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


def counted(count: int, noun: str) -> str:
    """`1 microbatch` or `2 microbatches`."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('ch') else 's'}"


def microbatches_text(mask: int) -> str:
    """`microbatch 3` or `microbatches 0-2`."""
    return f"microbatch{'es' if mask.bit_count() > 1 else ''} {listed(bits(mask))}"


def pieces_text(mask: int, grid: Grid) -> str:
    """The same for pieces: `microbatches 0-2 and sequence slice 1 of microbatch 3`, `microbatch 0 as the head`."""
    if grid.tied and mask >> grid.tied:
        once, as_head = mask & ((1 << grid.tied) - 1), mask >> grid.tied
        uses = [f"{pieces_text(once, grid)} as the embedding"] if once else []
        return " and ".join([*uses, f"{pieces_text(as_head, grid)} as the head"])
    slices = grid.sequence
    if slices == 1:
        return microbatches_text(mask)
    full = (1 << slices) - 1
    parts = {m: mask >> m * slices & full for m in sorted({piece // slices for piece in bits(mask)})}
    whole = mask_of(m for m, part in parts.items() if part == full)
    said = [microbatches_text(whole)] if whole else []
    for m, part in parts.items():
        if part != full:
            said.append(f"sequence slice{'s' * (part.bit_count() > 1)} {listed(bits(part))} of microbatch {m}")
    return " and ".join(said) or "no microbatch"
