"""Spec of a value: its form, which many values share, and its cells, which differ between microbatches.

A tensor has named indices. A value *holds* some pieces of each, and *sums* the contributions that have been added into
it. Batch and sequence are one index, the *cells*: slice s of microbatch m is cell m * slices + s. All other properties
of a value are its form. Equal forms are one object, so that rules are tables from forms to forms, and cells are checked
by one operation on an integer.

After the classes `Space`, `Form` and `Spec` come fractions of a value, texts of its parts for messages, and the map
between slices of a layer's flat parameters and pieces of its indices (`pieces_of_flat`, `flat_of_pieces`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple, cast
from weakref import WeakValueDictionary

from shardlab.common.errors import About
from shardlab.common.text import listed, plural
from shardlab.language.rules.kinds import (
    ONE,
    ROW_KINDS,
    WHOLE,
    Factor,
    Holds,
    Kind,
    Reduction,
    bits,
    mask_of,
    microbatches_text,
    numbered,
    piece_noun,
    repeat_pattern,
)

Slices = tuple[tuple[str, int], ...]
"""(index, bit set of the pieces held) for each index that a value does not hold whole, sorted by name."""


KEY = ("key",)
"""Index over which attention sums: the sequence's slices of keys and values."""


class Space(NamedTuple):
    """Numbers of pieces into which a program's values are divided.

    Attributes:
        microbatches: microbatches of the step.
        sequence: slices of each sequence.
        pieces: (index, pieces) for each index that parameters are cut along.
        uses: number of layers that use the first layer's weight (2: the head is tied to the embedding).
    """

    microbatches: int
    sequence: int = 1
    pieces: tuple[tuple[str, int], ...] = ()
    uses: int = 1

    @property
    def cells(self) -> int:
        """Number of cells of the step's batch."""
        return self.microbatches * self.sequence

    def count(self, index: str) -> int:
        """Return the number of pieces of an index (1: it is never cut)."""
        return next((pieces for name, pieces in self.pieces if name == index), 1)

    def full(self, index: str) -> int:
        """Return the bit set of all pieces of an index."""
        return (1 << self.count(index)) - 1


class Term(NamedTuple):
    """Contribution to a sum that was split because an index is cut.

    Attributes:
        indices: the cut indices that were summed over, sorted by name.
        bits: bit set of the pieces over which the term sums. For several indices, each bit stands for a tuple with one
            piece of each index; the last index counts fastest.
        merged: whether contributions are merged by the statistics of their softmax, rather than added.
    """

    indices: tuple[str, ...]
    bits: int
    merged: bool = False


class Form:
    """Properties of a value except its cells. Only `form_of` makes forms, so equal forms are one object.

    Attributes:
        kind, layer: kind of the value, and its layer: the key in names such as `grad_weights[3]`.
        step: the optimizer step to which the value belongs, from 0 on each tape. An update's results belong to the next
            step.
        space: the numbers of pieces into which the program's values are divided.
        holds: for parameters, the slices of the layer's flat buffer; for a scalar, the slices of all layers' buffers,
            concatenated.
        slices: for an activation, its pieces of each index that is not whole.
        term: for an activation, which term of a sum it is (None: no sum is open; the activation is complete).
        sums: for a weight's gradient, (index, number of pieces) of each further index, besides cells and uses, over
            which the complete gradient is a sum; outermost first.
        reduction: for a scalar, how the ranks' values were combined (SUM: it is a sum of squares).
        factor: for a gradient, the factor relative to its share of the step's mean.
        dtype: the dtype after a cast, by torch's name ("": the dtype that the run's precision sets for its kind).
        place: one of `refusals.PLACES` ("": the rank's device).
    """

    __slots__ = (
        "__weakref__",
        "dtype",
        "factor",
        "holds",
        "kind",
        "layer",
        "place",
        "reduction",
        "slices",
        "space",
        "step",
        "sums",
        "term",
    )

    def __init__(
        self,
        kind: Kind,
        layer: int,
        step: int,
        space: Space,
        holds: Holds,
        slices: Slices,
        term: Term | None,
        sums: Slices,
        reduction: Reduction,
        factor: Factor,
        dtype: str,
        place: str,
    ) -> None:
        self.kind, self.layer, self.step, self.space = kind, layer, step, space
        self.holds, self.slices, self.term, self.sums, self.reduction = (holds, slices, term, sums, reduction)
        self.factor, self.dtype, self.place = factor, dtype, place

    def key(self) -> tuple[object, ...]:
        return (
            self.kind, self.layer, self.step, self.space, self.holds, self.slices, self.term, self.sums, self.reduction,
            self.factor, self.dtype, self.place,
        )  # fmt: skip

    def but(self, **changes: object) -> Form:
        """Return this form with some fields changed."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        return form_of(**(fields | changes))  # pyright: ignore[reportArgumentType]

    def __reduce__(self) -> tuple[object, ...]:
        return form_of, self.key()

    def __repr__(self) -> str:
        return f"<{self.kind.value}[{self.layer}] {self.slices} {self.term}>"


_FIELDS = ("kind", "layer", "step", "space", "holds", "slices", "term", "sums", "reduction", "factor", "dtype", "place")
_FORMS: WeakValueDictionary[tuple[object, ...], Form] = WeakValueDictionary()


def form_of(
    kind: Kind,
    layer: int,
    step: int,
    space: Space,
    holds: Holds = WHOLE,
    slices: Slices = (),
    term: Term | None = None,
    sums: Slices = (),
    reduction: Reduction = Reduction.SUM,
    factor: Factor = ONE,
    dtype: str = "",
    place: str = "",
) -> Form:
    """Return the form with these fields. Equal forms are one object."""
    key = (kind, layer, step, space, holds, slices, term, sums, reduction, factor, dtype, place)
    form = _FORMS.get(key)
    if form is None:
        form = _FORMS[key] = Form(*key)
    return form


@lru_cache(maxsize=1 << 14)
def without_term(form: Form) -> Form:
    """Return the form of the complete sum of which a value is a term."""
    return form.but(term=None)


@lru_cache(maxsize=1 << 14)
def with_layer(form: Form, layer: int) -> Form:
    """Return the form with another layer."""
    return form.but(layer=layer)


Joined = tuple[int, "tuple[Joined, ...]"]
"""(cells of a piece, the pieces from which it was joined itself)."""


class Spec(NamedTuple):
    """Form and cells (slices of microbatches' sequences) of a value.

    Attributes:
        form: all properties except the cells.
        cells: bit set. For an activation, the cells that it holds; for a weight's gradient, the cells that it sums. If
            the weight has several uses, or other indices are summed over too, each combination of a use and of pieces
            of these indices has its own bits for all cells. 0 for weights, optimizer states and scalars.
        joined: for a value joined from pieces, the cells of each piece and the `joined` of that piece. A scatter cuts
            the value into these pieces again.
    """

    form: Form
    cells: int = 0
    joined: tuple[Joined, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.form.kind

    @property
    def layer(self) -> int:
        return self.form.layer

    @property
    def step(self) -> int:
        return self.form.step

    @property
    def holds(self) -> Holds:
        """Slices of the layer's flat parameters; for a scalar, slices of all layers' parameters in order."""
        return self.form.holds

    @property
    def microbatches(self) -> int:
        """Bit set of the microbatches of which it has at least a part (0: weights, optimizer states, scalars)."""
        space, cells = self.form.space, self.cells
        if self.form.kind is Kind.GRAD_WEIGHT:
            cells, total = 0, space.cells
            summed = self.cells
            while summed:
                cells |= summed & ((1 << total) - 1)
                summed >>= total
        return microbatches_of(cells, space)

    @property
    def whole_sequences(self) -> bool:
        """Whether it holds whole sequences of all its microbatches."""
        return whole_sequences(self.cells, self.form.space)

    @property
    def name(self) -> str:
        """Name such as `grad_weights[3]` or `scalars`."""
        form = self.form
        return "scalars" if form.kind is Kind.SCALAR else f"{form.kind.value}[{form.layer}]"

    def about(self, verb: str) -> About:
        """Return the name of an op on this value, for a refusal."""
        return _about(verb, self[0].kind, self[0].layer)

    def pieces(self, index: str) -> int:
        """Return the bit set of its pieces of an index."""
        return next((mask for name, mask in self.form.slices if name == index), self.form.space.full(index))

    def __str__(self) -> str:
        form = self.form
        kind, space = form.kind, form.space
        parts: list[str] = []
        if kind is Kind.GRAD_WEIGHT:
            parts.append(summed_text(form, self.cells) if self.cells else "zero")
        elif kind in ROW_KINDS:
            parts.append(cells_text(self.cells, space))
        parts += [f"{piece_noun(index)} {listed(bits(mask))} of {space.count(index)}" for index, mask in form.slices]
        if form.term is not None:
            parts.append(term_text(form, form.term))
        if kind is Kind.SCALAR and not form.holds.complete:
            parts.append(f"parts {form.holds} of the model")
        elif not form.holds.complete:
            parts.append(f"shard {form.holds}")
        if form.reduction is not Reduction.SUM:
            parts.append(f"the {form.reduction.value} of several ranks'")
        if form.factor is not ONE:
            parts.append(f"times {form.factor}")
        if form.dtype:
            parts.append(f"in {form.dtype}")
        if form.place:
            parts.append(f"on the {form.place}")
        if form.step:
            parts.append(f"step {form.step}")
        return self.name + (f" ({', '.join(parts)})" if parts else "")


new_spec: Callable[[type[Spec], tuple[Form, int, tuple[Joined, ...]]], Spec] = cast(Any, tuple).__new__
"""Constructor of a Spec without the Python call of a NamedTuple's own constructor. Every op makes specs."""


def fraction_of_pieces(form: Form) -> Fraction:
    """Return the fraction of the whole tensor that a value's pieces make up (1: all of it)."""
    share = Fraction(1)
    for index, pieces in form.slices:
        share *= Fraction(pieces.bit_count(), form.space.count(index))
    return share


def fraction_held(form: Form) -> Fraction:
    """Return the fraction of the whole that a value covers, by its pieces and as a term of a sum (1: all of it)."""
    share = fraction_of_pieces(form)
    if form.term is not None and form.term.indices != KEY:
        share *= Fraction(form.term.bits.bit_count(), count_terms(form, form.term))
    return share


def whole_sequences(cells: int, space: Space) -> bool:
    """Return whether cells are whole sequences."""
    slices = space.sequence
    if slices == 1:
        return True
    firsts = cells & repeat_pattern(1, slices, space.cells)
    return firsts * ((1 << slices) - 1) == cells


def microbatches_of(cells: int, space: Space) -> int:
    """Return the bit set of the microbatches of some cells."""
    slices = space.sequence
    return cells if slices == 1 else mask_of({cell // slices for cell in bits(cells)})


def cells_text(cells: int, space: Space) -> str:
    """Return text such as `microbatches 0-2 and sequence slice 1 of microbatch 3`."""
    slices = space.sequence
    if slices == 1:
        return microbatches_text(cells)
    full = (1 << slices) - 1
    slice_masks = {m: cells >> m * slices & full for m in sorted({cell // slices for cell in bits(cells)})}
    whole = mask_of(m for m, mask in slice_masks.items() if mask == full)
    texts = [microbatches_text(whole)] if whole else []
    for m, mask in slice_masks.items():
        if mask != full:
            texts.append(f"{numbered('sequence slice', mask)} of microbatch {m}")
    return " and ".join(texts) or "no microbatch"


def summed_text(form: Form, sums: int) -> str:
    """Return a gradient's contributions as text, such as `microbatch 0 as the head`."""
    space = form.space
    parts: list[str] = []
    for place in range(-(-sums.bit_length() // space.cells)):
        cells = sums >> place * space.cells & ((1 << space.cells) - 1)
        if not cells:
            continue
        extra, use = divmod(place, space.uses if form.layer == 0 else 1)
        words = [cells_text(cells, space)]
        if form.layer == 0 and space.uses > 1:
            words.append("as the head" if use else "as the embedding")
        if form.sums:
            words.append(f"of {form.sums[0][0]} {extra}")
        parts.append(" ".join(words))
    return " and ".join(parts)


def term_text(form: Form, term: Term) -> str:
    """Return a term as text, such as `the term of slice 0 of 4` or `queries 0-1 of 4 alone`."""
    numbers = listed(bits(term.bits))
    if term.indices == KEY:
        of_keys = form.kind is Kind.GRAD_KEYS_VALUES
        return f"{'queries' if of_keys else 'keys and values'} {numbers} of {form.space.sequence} alone"
    terms = plural("term", term.bits.bit_count())
    return f"the {terms} of {' x '.join(map(piece_noun, term.indices))} {numbers} of {count_terms(form, term)}"


def count_terms(form: Form, term: Term) -> int:
    """Return the number of terms of the complete sum to which a term belongs."""
    return math.prod(form.space.count(index) for index in term.indices)


def missing_text(noun: str, missing: int, of: str = "") -> str:
    """Return text such as `slice 1 is missing`, `experts 0, 2-3 are missing`."""
    return f"{numbered(noun, missing)}{of} {'are' if missing.bit_count() > 1 else 'is'} missing"


def flat_slices(cut: Sequence[str], space: Space) -> int:
    """Return the number of slices into which cuts along these indices divide a layer's flat parameters.

    There is a slice for each tuple of pieces, with the last index fastest.
    """
    return math.prod(space.count(index) for index in cut)


def pieces_of_flat(holds: Holds, cut: Sequence[str], space: Space) -> dict[str, int] | None:
    """Return the pieces of each cut index in some flat slices; None if some combination of these pieces is not among
    them.

    Args:
        holds: slices as `flat_slices` counts them.
        cut: the indices that the layer is cut along, outermost first.
        space: the numbers of pieces.
    """
    pieces = dict.fromkeys(cut, 0)
    for place in bits(holds.mask):
        for index in reversed(cut):
            place, piece = divmod(place, space.count(index))
            pieces[index] |= 1 << piece
    if _mask(pieces, space) != holds.mask:
        return None
    return {index: mask for index, mask in pieces.items() if mask != space.full(index)}


def flat_of_pieces(pieces: Mapping[str, int], cut: Sequence[str], space: Space) -> Holds:
    """Return the flat slices of some pieces. An index that is not named is whole.

    >>> flat_of_pieces({"head": 0b10}, ("expert", "head"), Space(1, 1, (("expert", 2), ("head", 2))))
    Holds(mask=10, of=4)
    """
    if not pieces:
        return WHOLE
    all = {index: pieces.get(index, space.full(index)) for index in cut}
    return Holds(_mask(all, space), flat_slices(cut, space)).simplified()


@lru_cache(maxsize=1 << 14)
def _about(verb: str, kind: Kind, layer: int) -> About:
    """Return what `Spec.about` does. Cached, since every collective passes this name for a possible refusal."""
    name = "scalars" if kind is Kind.SCALAR else f"{kind.value}[{layer}]"
    return About(f"{verb}({name})", -1 if kind is Kind.SCALAR else layer)


def _mask(pieces: Mapping[str, int], space: Space) -> int:
    """Return the bit set of the flat slices of these pieces."""
    places = [0]
    for index, mask in pieces.items():
        count = space.count(index)
        places = [base * count + piece for base in places for piece in bits(mask)]
    return mask_of(places)
