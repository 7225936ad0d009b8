"""The rules of what is dealt: equal pieces of the parameters or the tokens that a value holds.

Where a value was put together from pieces, those are dealt again; otherwise even ascending runs.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import islice

from shardlab.errors import Refused
from shardlab.rules.kind import ROW_KINDS, Kind
from shardlab.rules.pieces import bits, mask_of
from shardlab.rules.spec import Form, Joined, Spec


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
