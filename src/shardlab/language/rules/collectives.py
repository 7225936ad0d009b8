"""Rules of collectives and slices: concatenation of pieces, sums, equal parts, and exchanges.

Read in this order: `gather` (concatenates slices of parameters, cells of a batch, or pieces of one index), `reduce` and
`reduce_replicas` (sum; and mean, minimum and maximum), `scatter` and `slice_of` (equal pieces of a value's parameters
or tokens; if a value was joined from as many pieces, its tokens are cut into these), and `all_to_all` (a gather along
one index and a scatter along another). In every rule `op` is the start of a refusal's sentence, and `names` are the
names of the members whose values `specs` are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from typing import NoReturn

from shardlab.common.errors import About, Refused
from shardlab.common.text import counted, number_text
from shardlab.language.rules import arithmetic
from shardlab.language.rules.kinds import (
    INDICES,
    MOST_SLICES,
    ROW_KINDS,
    Holds,
    Kind,
    Reduction,
    bits,
    factor_of,
    mask_of,
    numbered,
    piece_noun,
)
from shardlab.language.rules.refusals import DISK, no_slices_refusal, require_compatible
from shardlab.language.rules.spec import KEY, Form, Joined, Spec, cells_text


def gather(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the concatenation of pieces: slices of parameters, cells of a batch, or pieces of one index.

    Raises:
        Refused: when the pieces overlap, belong to different values, or are terms of a sum.
    """
    first = specs[0]
    form = first[0]
    if form.kind not in ROW_KINDS and form.kind is not Kind.SCALAR:
        cells = first[1]
        if all(spec[1] == cells for spec in specs):
            whole = _united_slices(tuple([spec[0] for spec in specs]))
            if whole is not None:
                return Spec(whole, cells)
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, fault, "gather pieces of one value")
        require_compatible(op, first, spec, names[0], name)
        if spec.form.term is not None:
            fault = f"{name} gave {spec}, which is one term of a sum and no piece of the whole"
            remedy = "reduce before gathering (all_reduce, or reduce_scatter along the sequence)"
            raise Refused("a term", op, fault, remedy)
    if form.kind is Kind.SCALAR:
        raise no_slices_refusal(op)
    if form.kind not in ROW_KINDS:
        _refuse_slices(op, specs, names)
    pieces = form.slices and all(spec.cells == first.cells for spec in specs)
    if pieces or any(spec.form is not form for spec in specs):
        return _gathered_pieces(op, specs, names)
    return Spec(form, *unite_cells(op, specs, names))


def unite_cells(op: About, specs: Sequence[Spec], names: Sequence[str]) -> tuple[int, tuple[Joined, ...]]:
    cells = 0
    for spec, name in zip(specs, names, strict=True):
        if twice := cells & spec.cells:
            fault = f"{cells_text(twice, spec.form.space)} would come from {name} and from {_earlier(name)} as well"
            raise Refused("pieces overlap", op, fault, NO_OVERLAP, doubled=bits(twice))
        cells |= spec.cells
    return cells, tuple([(spec.cells, spec.joined) for spec in specs])


def differing_index(op: About, specs: Sequence[Spec], names: Sequence[str]) -> str:
    """Return the one index along which the members hold different pieces. Everything else must be equal."""
    first = specs[0]
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.but(slices=()) is not first.form.but(slices=()):
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, fault, "put pieces of one value together, for the same tokens")
    cuts = [dict(spec.form.slices) for spec in specs]
    indices = {index for pieces in cuts for index in pieces}
    unequal = {index for index in indices if any(pieces.get(index) != cuts[0].get(index) for pieces in cuts)} or indices
    if len(unequal) != 1:
        fault = f"{names[0]} gave {first} and {names[-1]} {specs[-1]}, which differ in more than one index"
        raise Refused("other indices", op, fault, "put together along one index, then along the other")
    return unequal.pop()


def unite_pieces(op: About, specs: Sequence[Spec], names: Sequence[str], index: str) -> int:
    mask = 0
    for spec, name in zip(specs, names, strict=True):
        pieces = spec.pieces(index)
        if twice := mask & pieces:
            noun = piece_noun(index)
            fault = f"{numbered(noun, twice)} would be counted twice ({name} and {_earlier(name)} both have it)"
            raise Refused("pieces overlap", op, fault, f"give each {noun} once", doubled=bits(twice))
        mask |= pieces
    return mask


def with_pieces(form: Form, index: str, pieces: int) -> Form:
    """Return the form with these pieces of an index."""
    slices = dict(form.slices)
    slices.pop(index, None)
    if pieces != form.space.full(index):
        slices[index] = pieces
    return form.but(slices=tuple(sorted(slices.items())))


NO_OVERLAP = "gather pieces that do not overlap"


def reduce(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the sum of the members' values.

    Raises:
        Refused: if a contribution would be counted twice, or if values are not terms of one sum.
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
            whole = _united_terms(tuple([spec[0] for spec in specs]))
            if whole is not None:
                return Spec(whole, cells, specs[0][2])
    if form.term is not None and form.term.merged:
        fault = f"{specs[0]} is no term of a sum, since each rank has its own queries"
        raise Refused("merged terms", op, fault, "add these parts on the rank that has the queries")
    return arithmetic.add(op, specs, names)


def reduce_replicas(op: About, reduction: Reduction, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the mean, minimum or maximum of values that are equal on all members: the value itself.

    Weights must be equal on all members. The mean of different gradients is their sum divided by the number of ranks,
    and keeps that factor. (The loss of a microbatch is weighted by its share of the step's tokens, so the sum of the
    gradients is their exact mean already; a program that takes a mean must multiply by the number of ranks.) Scalars
    may differ. Their mean, minimum or maximum is for monitoring: `update` does not take it as a norm.

    Raises:
        Refused: for other kinds of values, for weights that differ, and for the minimum or maximum of gradients that
            differ.
    """
    first = specs[0]
    by, op = reduction.value, op._replace(text=f"{op.text} by {reduction.value}")
    if first.kind not in (Kind.WEIGHT, Kind.GRAD_WEIGHT, Kind.SCALAR):
        remedy = "reduce weights, their gradients and scalars by anything"
        raise Refused("wrong kind", op, f"{first} was given", remedy)
    other = next((index for index, spec in enumerate(specs) if spec != first), None)
    if other is None:
        return first
    values_text = f"{names[0]} gave {first} and {names[other]} {specs[other]}"
    if first.kind is Kind.SCALAR:
        return _combine_scalars(op, values_text, reduction, specs)
    if first.kind is Kind.WEIGHT:
        fault = f"{values_text}; the {by} of different weights is no weight"
        raise Refused("replicas differ", op, fault, "give the same on all ranks")
    if reduction is Reduction.MEAN:
        return arithmetic.apply_factor(op, reduce(op, specs, names), 1 / factor_of(len(specs)))
    fault = f"{values_text}; the {by} of different gradients is no gradient"
    raise Refused("replicas differ", op, fault, 'take reduction="sum"')


def scatter(op: About, total: Spec, parts: int) -> list[Spec]:
    """Return equal pieces of a sum: of its parameters, or of its tokens.

    Raises:
        Refused: for a scalar, or if the tokens do not divide by the number of parts.
    """
    if total[0].kind not in ROW_KINDS and total[0].kind is not Kind.SCALAR:
        return [Spec(piece, total[1]) for piece in _split(total[0], parts)]
    return [scatter_part(op, total, parts, place) for place in range(parts)]


def scatter_part(op: About, total: Spec, parts: int, place: int) -> Spec:
    """Return one of the equal pieces of a sum.

    Raises:
        Refused: for a scalar, or if the tokens do not divide by the number of parts.
    """
    form = total[0]
    if form.kind is Kind.SCALAR:
        raise no_slices_refusal(op)
    if form.kind not in ROW_KINDS:
        holds = next(islice(form.holds.split(parts), place, None))
        return Spec(form.but(holds=holds), total[1])
    part_cells = divide_cells(total, parts)
    if part_cells is None:
        fault = f"{total} has sequences of {form.space.sequence} slices, which do not divide among {parts} ranks"
        raise Refused("does not divide", op, fault, "scatter over an axis whose ranks divide them")
    cells, joined = part_cells[place]
    return Spec(form, cells, joined)


def numbering_of_parts(part: str, of: int, maximum: int) -> str:
    """Return the remedy for a wrong part number: a value has `of` equal parts, and `of` may be at most `maximum`."""
    if of > maximum:
        return f"take at most {maximum:,} {part}s"
    return f"of {of} {part}s, name one of 0-{of - 1}" if of > 1 else f"give the number of {part}s as `of`: 2 or more"


def slice_of(value: Spec, place: int, parts: int) -> Spec:
    """Return one of the equal parts of a value: of its parameters, or of its tokens.

    Raises:
        Refused: for a part that does not exist, for a scalar, and if the tokens do not divide by the number of parts.
    """
    op = value.about("slice")
    if not 0 <= place < parts or parts * value.holds.of > MOST_SLICES:
        remedy = numbering_of_parts("slice", parts, MOST_SLICES // value.holds.of)
        raise Refused("unknown slice", op, f"slice {number_text(place)} of {number_text(parts)} was asked for", remedy)
    if value.kind is Kind.SCALAR:
        remedy = "slice weights, optimizer states, activations or gradients"
        raise Refused("wrong kind", op, f"{value} was given", remedy)
    if value.kind not in ROW_KINDS:
        return Spec(_slice(value[0], place, parts), value[1])
    part_cells = divide_cells(value, parts)
    if part_cells is None:
        noun = "sequence slice" if value.form.space.sequence > 1 else "microbatch"
        fault = f"{value} has {counted(value.cells.bit_count(), noun)}, no multiple of {parts}"
        raise Refused("does not divide", op, fault, "take a number of parts that divides them")
    cells, joined = part_cells[place]
    return Spec(value[0], cells, joined)


def is_view(whole: Spec, part: Spec) -> bool:
    """Return whether a slice is a view of the whole value's memory: its tokens must be contiguous there."""
    if whole.kind not in ROW_KINDS:
        return True
    mask_pairs = (whole.microbatches, part.microbatches), (slices_of_any_sequence(whole), slices_of_any_sequence(part))
    return all(outer & (1 << inner.bit_length()) - (inner & -inner) == inner for outer, inner in mask_pairs)


def divide_cells(spec: Spec, parts: int) -> list[Joined] | None:
    """Return each member's cells of a value: the pieces from which it was joined, or else even ascending runs.

    A run is the same part of every sequence, or some microbatches if sequences are not cut. The result is None if the
    cells do not divide.
    """
    if len(spec.joined) == parts:
        return list(spec.joined)
    space = spec.form.space
    if space.sequence > 1:
        return _runs_of_sequences(spec.cells, parts, space.sequence)
    cells = list(bits(spec.cells))
    run_length, rest = divmod(len(cells), parts)
    return None if rest else [(mask_of(cells[i * run_length : (i + 1) * run_length]), ()) for i in range(parts)]


def all_to_all(op: About, specs: Sequence[Spec], names: Sequence[str], indices: Sequence[str]) -> list[Spec]:
    """Return the members' results of an exchange, which gathers cells and scatters an index, or the reverse.

    If all values are the same term of a sum, so are the results.

    Args:
        indices: the indices along which values of this kind and layer may be cut.

    Raises:
        Refused: for a value that cannot be cut along another index than the batch, and for pieces that overlap or do
            not divide.
    """
    first, count = specs[0], len(specs)
    form = first.form
    indices = [index for index in indices if INDICES[index].exchanged]
    if len(indices) != 1 or (form.term is not None and form.term.indices == KEY):
        remedy = (
            "exchange what may be cut along another index than the batch, as experts' buffers are: what goes into "
            "experts or comes out of them"
        )
        raise Refused("not exchanged", op, f"{first} was given", remedy)
    (index,) = indices
    count_of_first = first.cells.bit_count()
    for spec, name in zip(specs, names, strict=True):
        if spec.form is not form and (
            spec.form.but(slices=()) is not form.but(slices=()) or (not spec.form.slices) != (not form.slices)
        ):
            remedy = "let all members give buffers of all experts, or all of some experts, of one layer"
            raise Refused("other values", op, f"{names[0]} gave {first} and {name} {spec}", remedy)
        if spec.cells.bit_count() != count_of_first:
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other tokens", op, fault, "give the same number of microbatches on all ranks")
    if count == 1:
        return list(specs)
    if all(spec.form is form for spec in specs):
        runs = _runs(form, index, count)
        if runs is None:
            pieces_text = counted(first.pieces(index).bit_count(), piece_noun(index))
            fault = f"{pieces_text} cannot be divided evenly among {count} ranks"
            raise Refused("does not divide", op, fault, "use a group whose size divides their number")
        cells, joined = unite_cells(op, specs, names)
        return [Spec(run, cells, joined) for run in runs]
    whole = _united_runs(tuple([spec.form for spec in specs]), index)
    if whole is None:
        _refuse_runs(op, specs, names, index)
    member_cells = divide_cells(first, count)
    if member_cells is None:
        fault = f"{first} does not divide among {count} ranks"
        raise Refused("does not divide", op, fault, "give each rank the same number of microbatches")
    if any(spec.cells != first.cells for spec in specs):
        fault = f"{names[0]} gave {first} and {names[-1]} {specs[-1]}"
        raise Refused("other tokens", op, fault, "give the same microbatches")
    return [Spec(whole, cells, joined) for cells, joined in member_cells]


@lru_cache(maxsize=1 << 12)
def _united_slices(forms: tuple[Form, ...]) -> Form | None:
    """Return the form of the parameters that these slices make up; None if they cannot be concatenated."""
    first = forms[0]
    if first.place == DISK:
        return None
    holds = Holds(0, 1)
    for form in forms:
        if (holds & form.holds).mask or form.but(holds=first.holds) is not first:
            return None
        holds |= form.holds
    return first.but(holds=holds.simplified())


def _refuse_slices(op: About, specs: Sequence[Spec], names: Sequence[str]) -> None:
    """Refuse slices of parameters that cannot be concatenated, with the reason."""
    first = specs[0]
    holds = Holds(0, first.form.holds.of)
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.sums != first.form.sums:
            fault = (
                f"{names[0]} gave {first} and {name} {spec}; the pieces sum different microbatches, so together they "
                "are the gradient of neither"
            )
            raise Refused("other sums", op, fault, "reduce before gathering")
        twice, of = holds & spec.form.holds
        if twice:
            overlap_text = "all of it" if first.form.holds.complete else f"{numbered('slice', twice)} of {of}"
            fault, remedy = f"{overlap_text} would come from {name} and from {_earlier(name)} as well", NO_OVERLAP
            if first.form.holds.complete:
                fault = f"{first} is whole on these ranks already, so {fault}"
                remedy = "use it without this gather, or gather the shard: keep it under a key of its own"
            raise Refused("pieces overlap", op, fault, remedy, doubled=bits(twice))
        holds |= spec.form.holds
    raise AssertionError("slices that fit are put together")


def _gathered_pieces(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the concatenation of pieces of one index, for the same tokens."""
    first, index = specs[0], differing_index(op, specs, names)
    if not INDICES[index].gathered:
        fault = f"{first} was given, which cannot be gathered"
        raise Refused("not gathered", op, fault, INDICES[index].together)
    return first._replace(form=with_pieces(first.form, index, unite_pieces(op, specs, names, index)))


def _earlier(name: str) -> str:
    """Return the text for an earlier member, such as `an earlier rank`."""
    return f"an earlier {name.split()[0]}"


@lru_cache(maxsize=1 << 12)
def _united_terms(forms: tuple[Form, ...]) -> Form | None:
    """Return the form of a sum of terms; None if they cannot be added, or if the cells decide whether the sum is
    complete.
    """
    first, bare, total = forms[0], forms[0].but(term=None), 0
    assert first.term is not None
    indices = first.term.indices
    for form in forms:
        term = form.term
        if term is None or term.indices != indices or term.bits & total or form.but(term=None) is not bare:
            return None
        total |= term.bits
    count = math.prod(first.space.count(index) for index in indices)
    if indices == KEY:
        return None
    return bare if total == (1 << count) - 1 else first.but(term=first.term._replace(bits=total))


def _combine_scalars(op: About, values_text: str, reduction: Reduction, specs: Sequence[Spec]) -> Spec:
    """Return the mean, minimum or maximum of scalars. It covers all parts of the model that any of them covers."""
    mixes = {Reduction.SUM} if reduction is Reduction.MEAN else {Reduction.SUM, reduction}
    first = specs[0]
    holds = first.holds
    for spec in specs:
        if spec.kind is not Kind.SCALAR or spec.step != first.step or spec.form.reduction not in mixes:
            remedy = f"take the {reduction.value} of sums of squares of one step"
            raise Refused("other values", op, values_text, remedy)
        holds |= spec.holds
    return Spec(first.form.but(holds=holds, reduction=reduction))


@lru_cache(maxsize=1 << 10)
def _split(form: Form, parts: int) -> list[Form]:
    """Return the forms of equal slices of a form's parameters."""
    return [form.but(holds=holds) for holds in form.holds.split(parts)]


@lru_cache(maxsize=1 << 14)
def _slice(form: Form, place: int, parts: int) -> Form:
    return form.but(holds=next(islice(form.holds.split(parts), place, None)).simplified())


def slices_of_any_sequence(spec: Spec) -> int:
    """Return the bit set of the slices that a value holds of at least one sequence."""
    slices = spec.form.space.sequence
    return mask_of({cell % slices for cell in bits(spec.cells)})


@lru_cache(maxsize=1 << 12)
def _runs_of_sequences(cells: int, parts: int, sequence: int) -> list[Joined] | None:
    rows: dict[int, list[int]] = {}
    for cell in bits(cells):
        rows.setdefault(cell // sequence, []).append(cell)
    if any(len(row) % parts for row in rows.values()):
        return None
    runs = [[row[i * len(row) // parts : (i + 1) * len(row) // parts] for row in rows.values()] for i in range(parts)]
    return [(mask_of(cell for run in member for cell in run), ()) for member in runs]


@lru_cache(maxsize=1 << 12)
def _runs(form: Form, index: str, parts: int) -> list[Form] | None:
    """Return the forms of a value that is cut into equal runs of cut of an index; None if they do not divide."""
    cut = list(bits(dict(form.slices).get(index, form.space.full(index))))
    size, rest = divmod(len(cut), parts)
    return None if rest else [with_pieces(form, index, mask_of(cut[i * size : (i + 1) * size])) for i in range(parts)]


@lru_cache(maxsize=1 << 12)
def _united_runs(forms: tuple[Form, ...], index: str) -> Form | None:
    """Return the form that joins all members' pieces of an index, in their order; None if they cannot be joined."""
    mask = 0
    for form in forms:
        pieces = dict(form.slices).get(index, 0)
        if pieces <= mask or pieces & mask or with_pieces(form, index, 0) is not with_pieces(forms[0], index, 0):
            return None
        mask |= pieces
    return with_pieces(forms[0], index, mask)


def _refuse_runs(op: About, specs: Sequence[Spec], names: Sequence[str], index: str) -> NoReturn:
    """Refuse the members' pieces of an index, with the reason why they cannot be joined."""
    differing_index(op, specs, names)
    unite_pieces(op, specs, names, index)
    fault = f"the ranks have their {piece_noun(index)}s in another order than the group's"
    raise Refused("other order", op, fault, "let them meet in its order")
