"""The rules of collectives: what each member receives of what all give.

A gather unites what is held, a reduction what is summed; reduce_scatter reduces and then deals pieces, and all_to_all
gathers along one index and deals along another. Where a value was put together from pieces, those are dealt again;
otherwise even ascending runs.

Everywhere `op` begins the sentence of a refusal, and `names` says who gave each value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NoReturn

from shardlab.errors import Refused
from shardlab.rules import update
from shardlab.rules.kind import ROW_KINDS, Kind, Reduction
from shardlab.rules.pieces import Holds, bits, common, listed, mask_of
from shardlab.rules.spec import KEY, Form, Joined, Spec, cells_text

GATHERED = frozenset({"slice"})
"""Indices whose pieces lie side by side and may be gathered; of heads and experts each rank keeps its own."""

EXCHANGED = frozenset({"expert"})
"""Indices whose pieces may be dealt to other ranks while cells are put together, and back."""


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
    return Spec(form, *_united_cells(op, specs, names))


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
                f"{op}: slice {listed(bits(mine.mask & theirs.mask))} of {mine.of} comes from {name} and from an "
                "earlier rank as well; gathered pieces must not overlap."
            )
        mask, of = mine.mask | theirs.mask, mine.of
    raise AssertionError("slices that fit are put together")


def _united_cells(op: str, specs: Sequence[Spec], names: Sequence[str]) -> tuple[int, tuple[Joined, ...]]:
    cells = 0
    for spec, name in zip(specs, names, strict=True):
        if twice := cells & spec.cells:
            raise Refused(
                f"{op}: {cells_text(twice, spec.form.space)} would come from {name} and from an earlier rank as well; "
                "gathered pieces must not overlap."
            )
        cells |= spec.cells
    return cells, tuple([(spec.cells, spec.joined) for spec in specs])


def _gathered_pieces(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one index, for the same tokens."""
    first, index = specs[0], _index_apart(op, specs, names)
    if index not in GATHERED:
        raise Refused(
            f"{op}: {first} was given, which does not lie beside others to be gathered; {update.SIDE_BY_SIDE[index]}."
        )
    return first._replace(form=_with(first.form, index, _united_pieces(op, specs, names, index)))


def _index_apart(op: str, specs: Sequence[Spec], names: Sequence[str]) -> str:
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


def _united_pieces(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> int:
    mask = 0
    for spec, name in zip(specs, names, strict=True):
        pieces = spec.pieces(index)
        if twice := mask & pieces:
            raise Refused(
                f"{op}: {index} {listed(bits(twice))} would be counted twice ({name} and an earlier rank both have "
                f"it); each {index} belongs into the whole once."
            )
        mask |= pieces
    return mask


def _with(form: Form, index: str, pieces: int) -> Form:
    """The form with these pieces of an index."""
    slices = dict(form.slices)
    slices.pop(index, None)
    if pieces != form.space.full(index):
        slices[index] = pieces
    return form.but(slices=tuple(sorted(slices.items())))


def reduce(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of the members' values.

    Raises:
        Refused: when a contribution would be counted twice, or values are no terms of one sum.
    """
    form, total = specs[0][0], 0
    if form.kind is Kind.GRAD_WEIGHT:
        for spec in specs:
            if spec[0] is not form or spec[1] & total:
                break
            total |= spec[1]
        else:
            return Spec(form, total)
    elif form.term is not None:
        cells = specs[0][1]
        if all(spec[1] == cells for spec in specs):
            united = _united_terms(tuple([spec[0] for spec in specs]))
            if united is not None:
                return Spec(united, cells, specs[0][2])
    if form.term is not None and form.term.merged:
        raise Refused(
            f"{op}: {specs[0]} is no term of a sum, since each rank has its own queries; add what one rank's queries "
            "have met."
        )
    return update.add(op, specs, names)


@lru_cache(maxsize=1 << 12)
def _united_terms(forms: tuple[Form, ...]) -> Form | None:
    """The form of the sum of terms; None where they do not fit, or where the cells tell when a sum is complete."""
    first, bare, total = forms[0], forms[0].but(term=None), 0
    assert first.term is not None
    over = first.term.over
    for form in forms:
        term = form.term
        if term is None or term.over != over or term.bits & total or form.but(term=None) is not bare:
            return None
        total |= term.bits
    count = math.prod(first.space.count(index) for index in over)
    if over == KEY:
        return None
    return bare if total == (1 << count) - 1 else first.but(term=first.term._replace(bits=total))


def scatter(op: str, total: Spec, parts: int) -> list[Spec]:
    """Equal pieces of a sum: of the parameters, or of the tokens.

    Raises:
        Refused: for a scalar, or tokens that do not divide.
    """
    if total[0].kind not in ROW_KINDS and total[0].kind is not Kind.SCALAR:
        return [Spec(piece, total[1]) for piece in _split(total[0], parts)]
    return [share(op, total, parts, place) for place in range(parts)]


def share(op: str, total: Spec, parts: int, place: int) -> Spec:
    """One of the equal pieces of a sum.

    Raises:
        Refused: for a scalar, or tokens that do not divide.
    """
    form = total[0]
    if form.kind is Kind.SCALAR:
        raise Refused(f"{op}: a scalar has no slices; all_reduce it.")
    if form.kind not in ROW_KINDS:
        holds = next(islice(form.holds.split(parts), place, None))
        return Spec(form.but(holds=holds), total[1])
    dealt = deal(total, parts)
    if dealt is None:
        raise Refused(
            f"{op}: {total} has sequences of {form.space.sequence} slices, which do not divide among {parts} ranks; "
            "scatter over an axis whose ranks divide them."
        )
    cells, joined = dealt[place]
    return Spec(form, cells, joined)


@lru_cache(maxsize=1 << 10)
def _split(form: Form, parts: int) -> list[Form]:
    """The forms of equal slices of what parameters are held."""
    return [form.but(holds=holds) for holds in form.holds.split(parts)]


def deal(spec: Spec, parts: int) -> list[Joined] | None:
    """A value's cells for each of so many members: the pieces that it was joined from, or even ascending runs.

    A run is the same part of every sequence; or, where sequences are not cut, some microbatches. None if they do not
    divide.
    """
    if len(spec.joined) == parts:
        return list(spec.joined)
    space = spec.form.space
    if space.sequence > 1:
        return _runs_of_sequences(spec.cells, parts, space.sequence)
    cells = list(bits(spec.cells))
    each, rest = divmod(len(cells), parts)
    return None if rest else [(mask_of(cells[i * each : (i + 1) * each]), ()) for i in range(parts)]


@lru_cache(maxsize=1 << 12)
def _runs_of_sequences(cells: int, parts: int, sequence: int) -> list[Joined] | None:
    held: dict[int, list[int]] = {}
    for cell in bits(cells):
        held.setdefault(cell // sequence, []).append(cell)
    if any(len(each) % parts for each in held.values()):
        return None
    runs = [
        [each[i * len(each) // parts : (i + 1) * len(each) // parts] for each in held.values()] for i in range(parts)
    ]
    return [(mask_of(cell for run in each for cell in run), ()) for each in runs]


def all_to_all(op: str, specs: Sequence[Spec], names: Sequence[str], indices: Sequence[str]) -> list[Spec]:
    """Cells together and an index apart, or back again.

    Args:
        indices: along which such a value may be cut.

    Raises:
        Refused: for a value that has no other index to cut than the batch, and where pieces overlap or do not divide.
    """
    first, count = specs[0], len(specs)
    form = first.form
    if len(indices) != 1 or indices[0] not in EXCHANGED or form.term is not None:
        raise Refused(
            f"{op}: {first} was given; an all_to_all exchanges what may be cut along another index than the batch, as "
            "experts' buffers are: what goes into experts or comes out of them."
        )
    (index,) = indices
    count_of_first = first.cells.bit_count()
    for spec, name in zip(specs, names, strict=True):
        if spec.form is not form and (
            spec.form.but(slices=()) is not form.but(slices=()) or (not spec.form.slices) != (not form.slices)
        ):
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; all give buffers of all experts, or all give some "
                "experts' buffers, of one layer."
            )
        if spec.cells.bit_count() != count_of_first:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; give equally many microbatches.")
    if count == 1:
        return list(specs)
    if all(spec.form is form for spec in specs):
        runs = _runs(form, index, count)
        if runs is None:
            held = first.pieces(index).bit_count()
            raise Refused(f"{op}: {held} slices of the {index}s do not divide among {count} ranks; meet on axis ep.")
        cells, joined = _united_cells(op, specs, names)
        return [Spec(run, cells, joined) for run in runs]
    united = _united_runs(tuple([spec.form for spec in specs]), index)
    if united is None:
        _refuse_runs(op, specs, names, index)
    dealt = deal(first, count)
    if dealt is None:
        raise Refused(f"{op}: {first} does not divide among {count} ranks; each takes equally many microbatches.")
    if any(spec.cells != first.cells for spec in specs):
        raise Refused(f"{op}: {names[0]} gave {first} and {names[-1]} {specs[-1]}; give the same microbatches.")
    return [Spec(united, cells, joined) for cells, joined in dealt]


@lru_cache(maxsize=1 << 12)
def _runs(form: Form, index: str, parts: int) -> list[Form] | None:
    """The forms of even runs of what is held of an index; None if it does not divide."""
    held = list(bits(dict(form.slices).get(index, form.space.full(index))))
    each, rest = divmod(len(held), parts)
    return None if rest else [_with(form, index, mask_of(held[i * each : (i + 1) * each])) for i in range(parts)]


@lru_cache(maxsize=1 << 12)
def _united_runs(forms: tuple[Form, ...], index: str) -> Form | None:
    """The form with all pieces of an index that members hold in their order; None where they do not fit."""
    mask = 0
    for form in forms:
        pieces = dict(form.slices).get(index, 0)
        if pieces <= mask or pieces & mask or _with(form, index, 0) is not _with(forms[0], index, 0):
            return None
        mask |= pieces
    return _with(forms[0], index, mask)


def _refuse_runs(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> NoReturn:
    """Say why members' pieces of an index cannot be put together."""
    _index_apart(op, specs, names)
    _united_pieces(op, specs, names, index)
    raise Refused(f"{op}: the ranks have their {index}s in another order than the group's; they meet in its order.")


def replicas(op: str, reduction: Reduction, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The mean, least or largest of values that are the same on all members: the value itself.

    Of different weights or gradients it would be neither's, whatever they hold. In particular no mean of gradients is
    wanted: a microbatch's loss is weighted by its share of the step's tokens, so that sums are exact means already, and
    a mean over ranks would divide by their number once more. Scalars may differ, for what is taken of them is only to
    be looked at (the largest is infinite if any rank's is): no norm, and no update takes it.

    Raises:
        Refused: for other values than these, or when they differ.
    """
    first = specs[0]
    op = f"{op} by {reduction.value}"
    if first.kind not in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.SCALAR):
        raise Refused(f"{op}: {first} was given; only weights, their gradients and scalars are reduced by anything.")
    other = next((at for at, spec in enumerate(specs) if spec != first), None)
    if other is None:
        return first
    gave = f"{op}: {names[0]} gave {first} and {names[other]} {specs[other]}"
    if first.kind is Kind.SCALAR:
        return _figures(gave, reduction, specs)
    if first.kind is Kind.WEIGHT:
        raise Refused(f"{gave}; the {reduction.value} of different weights is no weight. Give the same on all ranks.")
    why = (
        f"gradients are shares of the step's mean already, so a mean over ranks is 1/{len(specs)} of it"
        if reduction is Reduction.MEAN
        else f"the {reduction.value} of different gradients is no gradient"
    )
    raise Refused(f'{gave}; {why}. Take reduction="sum".')


def _figures(gave: str, reduction: Reduction, specs: Sequence[Spec]) -> Spec:
    """Combine scalars that may differ: about every part of the model that any of them is about."""
    mixes = {Reduction.SUM} if reduction is Reduction.MEAN else {Reduction.SUM, reduction}
    first = specs[0]
    holds = first.holds
    for spec in specs:
        if spec.kind is not Kind.SCALAR or spec.step != first.step or spec.form.reduction not in mixes:
            raise Refused(
                f"{gave}; a {reduction.value} is taken of scalars of one step, all sums or all such themselves."
            )
        mine, theirs = common(holds, spec.holds)
        holds = Holds(mine.mask | theirs.mask, mine.of)
    return Spec(first.form.but(holds=holds, reduction=reduction))
