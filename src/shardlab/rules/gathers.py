"""The rules of what is laid side by side: slices of parameters, cells of a batch, pieces of one index.

Everywhere `op` begins the sentence of a refusal, and `names` says who gave each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from shardlab.errors import Refused
from shardlab.rules import update
from shardlab.rules.index import INDICES, piece_of
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.pieces import Holds, bits, common, listed
from shardlab.rules.spec import Form, Joined, Spec, cells_text


def gather(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
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
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; only pieces of one value can be gathered.")
        if spec.form.factor is not form.factor:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; {update.ALIKE}.")
        if spec.form.term is not None:
            raise Refused(
                f"{op}: {name} gave {spec}, which is one term of a sum and no piece of the whole. Reduce before "
                "gathering (all_reduce, or reduce_scatter along the sequence)."
            )
    if form.kind is Kind.SCALAR:
        raise Refused(f"{op}: a scalar has no slices; all_reduce it.")
    if form.kind not in ROW_KINDS:
        _refuse_slices(op, specs, names)
    pieces = form.slices and (form.kind is Kind.STATS or all(spec.cells == first.cells for spec in specs))
    if pieces or any(spec.form is not form for spec in specs):
        return _gathered_pieces(op, specs, names)
    return Spec(form, *united_cells(op, specs, names))


@lru_cache(maxsize=1 << 12)
def _united_slices(forms: tuple[Form, ...]) -> Form | None:
    """The form of parameters that are put together from slices; None where they do not fit."""
    first = forms[0]
    mask, of = 0, 1
    for form in forms:
        mine, theirs = common(Holds(mask, of), form.holds)
        if mine.mask & theirs.mask or form.but(holds=first.holds) is not first:
            return None
        mask, of = mine.mask | theirs.mask, mine.of
    return first.but(holds=Holds(mask, of).simplified())


def _refuse_slices(op: str, specs: Sequence[Spec], names: Sequence[str]) -> None:
    """Say why slices of parameters cannot be put together."""
    first = specs[0]
    mask, of = 0, first.form.holds.of
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.over != first.form.over:
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; the pieces sum different microbatches, so together "
                "they are the gradient of neither. Reduce before gathering."
            )
        mine, theirs = common(Holds(mask, of), spec.form.holds)
        if mine.mask & theirs.mask:
            raise Refused(
                f"{op}: slice {listed(bits(mine.mask & theirs.mask))} of {mine.of} comes from {name} and from "
                f"{_earlier(name)} as well; gathered pieces must not overlap."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    raise AssertionError("slices that fit are put together")


def united_cells(op: str, specs: Sequence[Spec], names: Sequence[str]) -> tuple[int, tuple[Joined, ...]]:
    cells = 0
    for spec, name in zip(specs, names, strict=True):
        if twice := cells & spec.cells:
            raise Refused(
                f"{op}: {cells_text(twice, spec.form.space)} would come from {name} and from {_earlier(name)} as well; "
                "gathered pieces must not overlap."
            )
        cells |= spec.cells
    return cells, tuple([(spec.cells, spec.joined) for spec in specs])


def _gathered_pieces(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one index, for the same tokens."""
    first, index = specs[0], index_apart(op, specs, names)
    if not INDICES[index].gathered:
        raise Refused(
            f"{op}: {first} was given, which does not lie beside others to be gathered; {INDICES[index].together}."
        )
    return first._replace(form=with_pieces(first.form, index, united_pieces(op, specs, names, index)))


def index_apart(op: str, specs: Sequence[Spec], names: Sequence[str]) -> str:
    """Find the one index along which the members hold different pieces; all else must be equal."""
    first = specs[0]
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.but(slices=()) is not first.form.but(slices=()):
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; only pieces of one value, for the same tokens, are "
                "put together."
            )
    held = [dict(spec.form.slices) for spec in specs]
    every = {index for pieces in held for index in pieces}
    apart = {index for index in every if any(pieces.get(index) != held[0].get(index) for pieces in held)} or every
    if len(apart) != 1:
        raise Refused(f"{op}: {names[0]} gave {first} and {names[-1]} {specs[-1]}; they differ in more than one index.")
    return apart.pop()


def united_pieces(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> int:
    mask = 0
    for spec, name in zip(specs, names, strict=True):
        pieces = spec.pieces(index)
        if twice := mask & pieces:
            raise Refused(
                f"{op}: {piece_of(index)} {listed(bits(twice))} would be counted twice ({name} and {_earlier(name)} "
                f"both have it); each {piece_of(index)} belongs into the whole once."
            )
        mask |= pieces
    return mask


def with_pieces(form: Form, index: str, pieces: int) -> Form:
    """The form with these pieces of an index."""
    slices = dict(form.slices)
    slices.pop(index, None)
    if pieces != form.space.full(index):
        slices[index] = pieces
    return form.but(slices=tuple(sorted(slices.items())))


def _earlier(name: str) -> str:
    """`an earlier rank`, or what else gives values by number."""
    return f"an earlier {name.split()[0]}"
