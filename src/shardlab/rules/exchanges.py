"""The rule of all_to_all: gathers along one index and deals along another.

Everywhere `op` begins the sentence of a refusal, and `names` says who gave each value.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

from shardlab.errors import About, Refused
from shardlab.rules.dealing import deal
from shardlab.rules.gathers import index_apart, united_cells, united_pieces, with_pieces
from shardlab.rules.index import INDICES, piece_of
from shardlab.rules.pieces import bits, counted, mask_of
from shardlab.rules.spec import KEY, Form, Spec


def all_to_all(op: About, specs: Sequence[Spec], names: Sequence[str], indices: Sequence[str]) -> list[Spec]:
    """Cells together and an index apart, or back again; equal terms of sums stay such terms.

    Args:
        indices: along which such a value may be cut.

    Raises:
        Refused: for a value that has no other index to cut than the batch, and where pieces overlap or do not divide.
    """
    first, count = specs[0], len(specs)
    form = first.form
    indices = [index for index in indices if INDICES[index].exchanged]
    if len(indices) != 1 or (form.term is not None and form.term.over == KEY):
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
            remedy = "let all give buffers of all experts, or all give some experts' buffers, of one layer"
            raise Refused("other values", op, f"{names[0]} gave {first} and {name} {spec}", remedy)
        if spec.cells.bit_count() != count_of_first:
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other tokens", op, given, "give equally many microbatches")
    if count == 1:
        return list(specs)
    if all(spec.form is form for spec in specs):
        runs = _runs(form, index, count)
        if runs is None:
            held = counted(first.pieces(index).bit_count(), piece_of(index))
            given = f"{held} cannot be dealt evenly to {count} ranks"
            raise Refused("does not divide", op, given, "let ranks meet that divide them")
        cells, joined = united_cells(op, specs, names)
        return [Spec(run, cells, joined) for run in runs]
    united = _united_runs(tuple([spec.form for spec in specs]), index)
    if united is None:
        _refuse_runs(op, specs, names, index)
    dealt = deal(first, count)
    if dealt is None:
        given = f"{first} does not divide among {count} ranks"
        raise Refused("does not divide", op, given, "let each take equally many microbatches")
    if any(spec.cells != first.cells for spec in specs):
        given = f"{names[0]} gave {first} and {names[-1]} {specs[-1]}"
        raise Refused("other tokens", op, given, "give the same microbatches")
    return [Spec(united, cells, joined) for cells, joined in dealt]


@lru_cache(maxsize=1 << 12)
def _runs(form: Form, index: str, parts: int) -> list[Form] | None:
    """The forms of even runs of what is held of an index; None if it does not divide."""
    held = list(bits(dict(form.slices).get(index, form.space.full(index))))
    each, rest = divmod(len(held), parts)
    return None if rest else [with_pieces(form, index, mask_of(held[i * each : (i + 1) * each])) for i in range(parts)]


@lru_cache(maxsize=1 << 12)
def _united_runs(forms: tuple[Form, ...], index: str) -> Form | None:
    """The form with all pieces of an index that members hold in their order; None where they do not fit."""
    mask = 0
    for form in forms:
        pieces = dict(form.slices).get(index, 0)
        if pieces <= mask or pieces & mask or with_pieces(form, index, 0) is not with_pieces(forms[0], index, 0):
            return None
        mask |= pieces
    return with_pieces(forms[0], index, mask)


def _refuse_runs(op: About, specs: Sequence[Spec], names: Sequence[str], index: str) -> NoReturn:
    """Say why members' pieces of an index cannot be put together."""
    index_apart(op, specs, names)
    united_pieces(op, specs, names, index)
    given = f"the ranks have their {piece_of(index)}s in another order than the group's"
    raise Refused("other order", op, given, "let them meet in its order")
