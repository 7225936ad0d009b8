"""What a value is: its kind, its layer, and the two sets *holds* and *sums* from which every rule follows.

A value carries a `Spec`, never data. *holds* says which slices of the whole it contains, *sums* which
contributions have been added into it. Both are bit sets in Python integers, so that uniting and comparing
them is one machine operation for any usual number of microbatches and shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """The kinds of value; a kind's text is the name of the store that keeps it."""

    WEIGHT = "weights"
    OPT_STATE = "opt_states"
    ACTIVATION = "activations"
    GRAD_ACTIVATION = "grad_activations"
    GRAD_WEIGHT = "grad_weights"
    SCALAR = "scalars"
    SAVED = "saved"
    SAVED_FOR_WEIGHT = "saved_for_weight"

    __hash__ = object.__hash__  # an Enum's own hash is Python code, and kinds are dictionary keys on the hot path


ROW_KINDS = frozenset({Kind.ACTIVATION, Kind.GRAD_ACTIVATION, Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""Kinds whose pieces are batch rows; the pieces of the others are slices of a layer's flat parameters (of a scalar,
of all layers' one after the other)."""

AUTOGRAD_KINDS = frozenset({Kind.SAVED, Kind.SAVED_FOR_WEIGHT})
"""What autograd keeps between passes; no program holds it."""


class Holds(NamedTuple):
    """Which of `of` equal pieces of the whole a value contains: piece i is bit i of `mask`.

    For weights, optimizer states and weight gradients the whole is the layer's flat parameters; for
    activations and their gradients it is the global batch, and a piece is a microbatch. For a scalar it is the
    parameters of all layers, and held are those whose gradient's squares are in the sum.
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
        if times == 1:
            return self
        ones = (1 << times) - 1
        return Holds(sum(ones << (i * times) for i in bits(self.mask)), of)

    def simplified(self) -> Holds:
        """The same slices, counted in pieces as large as can be."""
        mask, of = self
        if mask == (1 << of) - 1:
            return WHOLE
        for pieces in range(1, of):
            if of % pieces == 0:
                coarse = Holds(mask_of({piece * pieces // of for piece in bits(mask)}), pieces)
                if coarse.refined(of).mask == mask:
                    return coarse
        return self

    def contains(self, other: Holds) -> bool:
        mine, theirs = common(self, other)
        return theirs.mask & ~mine.mask == 0

    def same(self, other: Holds) -> bool:
        mine, theirs = common(self, other)
        return mine.mask == theirs.mask

    def split(self, parts: int) -> list[Holds]:
        """Cut what is held into `parts` equal slices, in order."""
        fine = self.refined(self.of * parts // math.gcd(self.pieces, parts))
        places = list(bits(fine.mask))
        size = len(places) // parts
        return [Holds(mask_of(places[i * size : (i + 1) * size]), fine.of) for i in range(parts)]

    def __str__(self) -> str:
        return f"{listed(bits(self.mask))} of {self.of}"


WHOLE = Holds(1, 1)


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
    `sums` has bit m set when microbatch m's contribution has been added in (weight gradients only, else 0).
    """

    kind: Kind
    layer: int
    holds: Holds
    sums: int = 0
    step: int = 0

    @property
    def microbatches(self) -> int:
        """The microbatches that this value is about, as a bit set (0 for weights and optimizer states)."""
        return self.holds.mask if self.kind in ROW_KINDS else self.sums

    def __str__(self) -> str:
        parts: list[str] = []
        if self.kind in ROW_KINDS:
            parts.append(microbatches_text(self.holds.mask))
        elif self.kind is Kind.GRAD_WEIGHT:
            parts.append(microbatches_text(self.sums) if self.sums else "zero")
        if self.kind not in ROW_KINDS and not self.holds.complete:
            parts.append(f"shard {self.holds}" if self.kind is not Kind.SCALAR else f"parts {self.holds} of the model")
        if self.step:
            parts.append(f"step {self.step}")
        name = "scalars" if self.kind is Kind.SCALAR else f"{self.kind.value}[{self.layer}]"
        return name + (f" ({', '.join(parts)})" if parts else "")


def mask_of(numbers: Iterable[int]) -> int:
    """The bit set of some numbers."""
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def bits(mask: int) -> Iterator[int]:
    """The numbers in a bit set, ascending."""
    while mask > 0:  # a tape from a file may say anything; a negative number would never end
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def listed(numbers: Iterable[int]) -> str:
    """Numbers as a reader writes them: `0-3, 7`."""
    runs: list[tuple[int, int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1] = (runs[-1][0], n)
        else:
            runs.append((n, n))
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"


def microbatches_text(mask: int) -> str:
    """`microbatch 3` or `microbatches 0-2`."""
    return f"microbatch{'es' if mask.bit_count() > 1 else ''} {listed(bits(mask))}"
