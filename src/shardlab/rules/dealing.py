"""The rules of what is dealt: equal pieces of the parameters or the tokens that a value holds.

Where a value was put together from pieces, those are dealt again; otherwise even ascending runs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from shardlab.errors import About, Refused
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.pieces import MOST_SLICES, bits, counted, mask_of, number_text
from shardlab.rules.spec import Form, Joined, Spec
from shardlab.rules.wanted import no_slices


def scatter(op: About, total: Spec, parts: int) -> list[Spec]:
    """Equal pieces of a sum: of the parameters, or of the tokens.

    Raises:
        Refused: for a scalar, or tokens that do not divide.
    """
    if total[0].kind not in ROW_KINDS and total[0].kind is not Kind.SCALAR:
        return [Spec(piece, total[1]) for piece in _split(total[0], parts)]
    return [share(op, total, parts, place) for place in range(parts)]


def share(op: About, total: Spec, parts: int, place: int) -> Spec:
    """One of the equal pieces of a sum.

    Raises:
        Refused: for a scalar, or tokens that do not divide.
    """
    form = total[0]
    if form.kind is Kind.SCALAR:
        raise no_slices(op)
    if form.kind not in ROW_KINDS:
        holds = next(islice(form.holds.split(parts), place, None))
        return Spec(form.but(holds=holds), total[1])
    dealt = deal(total, parts)
    if dealt is None:
        given = f"{total} has sequences of {form.space.sequence} slices, which do not divide among {parts} ranks"
        raise Refused("does not divide", op, given, "scatter over an axis whose ranks divide them")
    cells, joined = dealt[place]
    return Spec(form, cells, joined)


@lru_cache(maxsize=1 << 10)
def _split(form: Form, parts: int) -> list[Form]:
    """The forms of equal slices of what parameters are held."""
    return [form.but(holds=holds) for holds in form.holds.split(parts)]


def slice_of(value: Spec, place: int, parts: int) -> Spec:
    """One of the equal parts of what a value holds, of its parameters or of its tokens.

    Raises:
        Refused: for a part that there is not, a scalar, or tokens that do not divide.
    """
    op = value.about("slice")
    if not 0 <= place < parts or parts * value.holds.of > MOST_SLICES:
        most = MOST_SLICES // value.holds.of
        remedy = f"count slices from 0, below their number, which is {most:,} at most"
        raise Refused("unknown slice", op, f"slice {number_text(place)} of {number_text(parts)} was asked for", remedy)
    if value.kind is Kind.SCALAR:
        remedy = "slice weights, optimizer states, activations or gradients"
        raise Refused("wrong kind", op, f"{value} was given", remedy)
    if value.kind not in ROW_KINDS:
        return Spec(_slice(value[0], place, parts), value[1])
    dealt = deal(value, parts)
    if dealt is None:
        what = "sequence slice" if value.form.space.sequence > 1 else "microbatch"
        given = f"{value} has {counted(value.cells.bit_count(), what)}, no multiple of {parts}"
        raise Refused("does not divide", op, given, "take a number of parts that divides them")
    cells, joined = dealt[place]
    return Spec(value[0], cells, joined)


@lru_cache(maxsize=1 << 14)
def _slice(form: Form, place: int, parts: int) -> Form:
    return form.but(holds=next(islice(form.holds.split(parts), place, None)).simplified())


def is_view(whole: Spec, part: Spec) -> bool:
    """Whether a slice lies in the value's own memory; of tokens that lie apart in it a copy is made."""
    if whole.kind not in ROW_KINDS:
        return True
    runs = (whole.microbatches, part.microbatches), (_of_a_sequence(whole), _of_a_sequence(part))
    return all(held & (1 << mine.bit_length()) - (mine & -mine) == mine for held, mine in runs)


def _of_a_sequence(spec: Spec) -> int:
    """The slices that a value holds of any sequence, as a bit set."""
    slices = spec.form.space.sequence
    return mask_of({cell % slices for cell in bits(spec.cells)})


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
