"""The rules of what is laid side by side: slices of parameters, cells of a batch, pieces of one index.

Everywhere `op` begins the sentence of a refusal, and `names` says who gave each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.errors import About, Refused
from shardlab.rules.index import INDICES, piece_of
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.pieces import Holds, bits, common, numbered
from shardlab.rules.place import DISK
from shardlab.rules.spec import Form, Joined, Spec, cells_text
from shardlab.rules.wanted import no_slices, want_alike


def gather(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The pieces laid side by side: slices of parameters, cells of a batch, or pieces of one index.

    Raises:
        Refused: when the pieces overlap, are not of one value, or are terms of a sum.
    """
    first = specs[0]
    form = first[0]
    if form.kind not in ROW_KINDS and form.kind is not Kind.SCALAR:
        cells = first[1]
        if all(spec[1] == cells for spec in specs):
            united = _united_slices(tuple([spec[0] for spec in specs]))
            if united is not None:
                return Spec(united, cells)
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, given, "gather pieces of one value")
        want_alike(op, first, spec, names[0], name)
        if spec.form.term is not None:
            given = f"{name} gave {spec}, which is one term of a sum and no piece of the whole"
            remedy = "reduce before gathering (all_reduce, or reduce_scatter along the sequence)"
            raise Refused("a term", op, given, remedy)
    if form.kind is Kind.SCALAR:
        raise no_slices(op)
    if form.kind not in ROW_KINDS:
        _refuse_slices(op, specs, names)
    pieces = form.slices and all(spec.cells == first.cells for spec in specs)
    if pieces or any(spec.form is not form for spec in specs):
        return _gathered_pieces(op, specs, names)
    return Spec(form, *united_cells(op, specs, names))


@lru_cache(maxsize=1 << 12)
def _united_slices(forms: tuple[Form, ...]) -> Form | None:
    """The form of parameters that are put together from slices; None where they do not fit."""
    first = forms[0]
    if first.place == DISK:
        return None
    mask, of = 0, 1
    for form in forms:
        mine, theirs = common(Holds(mask, of), form.holds)
        if mine.mask & theirs.mask or form.but(holds=first.holds) is not first:
            return None
        mask, of = mine.mask | theirs.mask, mine.of
    return first.but(holds=Holds(mask, of).simplified())


def _refuse_slices(op: About, specs: Sequence[Spec], names: Sequence[str]) -> None:
    """Say why slices of parameters cannot be put together."""
    first = specs[0]
    mask, of = 0, first.form.holds.of
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.over != first.form.over:
            given = (
                f"{names[0]} gave {first} and {name} {spec}; the pieces sum different microbatches, so together they "
                "are the gradient of neither"
            )
            raise Refused("other sums", op, given, "reduce before gathering")
        mine, theirs = common(Holds(mask, of), spec.form.holds)
        if twice := mine.mask & theirs.mask:
            given = f"{numbered('slice', twice)} of {mine.of} would come from {name} and from {_earlier(name)} as well"
            raise Refused("pieces overlap", op, given, APART, doubled=bits(twice))
        mask, of = mine.mask | theirs.mask, mine.of
    raise AssertionError("slices that fit are put together")


def united_cells(op: About, specs: Sequence[Spec], names: Sequence[str]) -> tuple[int, tuple[Joined, ...]]:
    cells = 0
    for spec, name in zip(specs, names, strict=True):
        if twice := cells & spec.cells:
            given = f"{cells_text(twice, spec.form.space)} would come from {name} and from {_earlier(name)} as well"
            raise Refused("pieces overlap", op, given, APART, doubled=bits(twice))
        cells |= spec.cells
    return cells, tuple([(spec.cells, spec.joined) for spec in specs])


def _gathered_pieces(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one index, for the same tokens."""
    first, index = specs[0], index_apart(op, specs, names)
    if not INDICES[index].gathered:
        given = f"{first} was given, which does not lie beside others to be gathered"
        raise Refused("not gathered", op, given, INDICES[index].together)
    return first._replace(form=with_pieces(first.form, index, united_pieces(op, specs, names, index)))


def index_apart(op: About, specs: Sequence[Spec], names: Sequence[str]) -> str:
    """Find the one index along which the members hold different pieces; all else must be equal."""
    first = specs[0]
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.but(slices=()) is not first.form.but(slices=()):
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, given, "put pieces of one value together, for the same tokens")
    held = [dict(spec.form.slices) for spec in specs]
    every = {index for pieces in held for index in pieces}
    apart = {index for index in every if any(pieces.get(index) != held[0].get(index) for pieces in held)} or every
    if len(apart) != 1:
        given = f"{names[0]} gave {first} and {names[-1]} {specs[-1]}, which differ in more than one index"
        raise Refused("other indices", op, given, "put together along one index, then along the other")
    return apart.pop()


def united_pieces(op: About, specs: Sequence[Spec], names: Sequence[str], index: str) -> int:
    mask = 0
    for spec, name in zip(specs, names, strict=True):
        pieces = spec.pieces(index)
        if twice := mask & pieces:
            noun = piece_of(index)
            given = f"{numbered(noun, twice)} would be counted twice ({name} and {_earlier(name)} both have it)"
            raise Refused("pieces overlap", op, given, f"give each {noun} once", doubled=bits(twice))
        mask |= pieces
    return mask


def with_pieces(form: Form, index: str, pieces: int) -> Form:
    """The form with these pieces of an index."""
    slices = dict(form.slices)
    slices.pop(index, None)
    if pieces != form.space.full(index):
        slices[index] = pieces
    return form.but(slices=tuple(sorted(slices.items())))


APART = "gather pieces that do not overlap"


def _earlier(name: str) -> str:
    """`an earlier rank`, or what else gives values by number."""
    return f"an earlier {name.split()[0]}"
