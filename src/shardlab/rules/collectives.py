"""The rules of collectives: what each member receives of what all give.

all_gather unites what is held, all_reduce what is summed; reduce_scatter is the one and then deals pieces, and
all_to_all gathers along one index and deals along another. Where a value was put together from pieces, those are dealt
again; otherwise even ascending runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlab.program.errors import Refused
from shardlab.program.tape import OpKind
from shardlab.program.values import ROW_KINDS, Holds, Kind, bits, common, listed, mask_of
from shardlab.rules import update
from shardlab.rules.spec import Form, Joined, Space, Spec, cells_text, microbatches_of

GATHERED = frozenset({"slice"})
"""Indices whose pieces lie side by side and may be gathered; of heads and experts each rank keeps its own."""

GATHERS = frozenset({OpKind.ALL_GATHER, OpKind.GATHER})


def collective(
    kind: OpKind, specs: Sequence[Spec], ranks: Sequence[int], indices: Mapping[tuple[Kind, int], Sequence[str]]
) -> list[Spec]:
    """What each member of the group receives, in group order (of a GATHER or REDUCE: what the root does).

    Args:
        indices: along which a value of a kind and layer may be cut.

    Raises:
        Refused: when the values do not belong together, or a contribution would be lost or counted twice.
    """
    first = specs[0]
    names = [f"rank {rank}" for rank in ranks]
    what = "scalars" if first.kind is Kind.SCALAR else f"{first.kind.value}[{first.layer}]"
    op = f"{kind.value}({what})"
    if kind is OpKind.ALL_TO_ALL:
        return _all_to_all(op, specs, names, indices)
    if kind in GATHERS:
        return [_gathered(op, specs, names)] * len(specs)
    total = _reduced(op, kind, specs, names)
    if kind is not OpKind.REDUCE_SCATTER:
        return [total] * len(specs)
    return _scattered(op, total, len(specs))


def _reduced(op: str, kind: OpKind, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of the members' values; at once where they are one form's and differ in what they sum."""
    first = specs[0]
    form = first[0]
    if form.kind is Kind.GRAD_WEIGHT:
        total = 0
        for spec in specs:
            if spec[0] is not form or spec[1] & total:
                break
            total |= spec[1]
        else:
            return Spec(form, total)
    if first.kind is Kind.SCALAR and kind is OpKind.REDUCE_SCATTER:
        raise Refused(f"{op}: a scalar has no slices; all_reduce it.")
    if form.term is not None and form.term.merged:
        raise Refused(
            f"{op}: {first} is no term of a sum, since each rank has its own queries; add what one rank's queries have "
            "met."
        )
    return update.add(op, specs, names)


def _gathered(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The pieces laid side by side: slices of parameters, cells of a batch, or pieces of one index."""
    first = specs[0]
    form = first.form
    for spec, name in zip(specs, names, strict=True):
        if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; only pieces of one value can be gathered.")
        if spec.form.term is not None:
            raise Refused(
                f"{op}: {name} gave {spec}, which is one term of a sum and no piece of the whole. Reduce before "
                "gathering (all_reduce, or reduce_scatter along the sequence)."
            )
    if first.kind is Kind.SCALAR:
        raise Refused(f"{op}: a scalar has no slices; all_reduce it.")
    if first.kind not in ROW_KINDS:
        return _gathered_parameters(op, specs, names)
    if any(spec.form is not form for spec in specs):
        return _gathered_pieces(op, specs, names)
    if form.slices and all(spec.cells == first.cells for spec in specs) and len(specs) > 1:
        return _gathered_pieces(op, specs, names)
    if form.slices and first.kind is Kind.STATS:
        return _gathered_pieces(op, specs, names)
    return Spec(form, *_united_cells(op, specs, names))


def _united_cells(op: str, specs: Sequence[Spec], names: Sequence[str]) -> tuple[int, tuple[Joined, ...]]:
    cells = 0
    for spec, name in zip(specs, names, strict=True):
        if twice := cells & spec.cells:
            raise Refused(
                f"{op}: {cells_text(twice, spec.form.space)} comes from {name} and from an earlier rank as well; "
                "gathered pieces must not overlap."
            )
        cells |= spec.cells
    return cells, tuple([(spec.cells, spec.joined) for spec in specs])


def _gathered_parameters(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
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
    return Spec(first.form.but(holds=Holds(mask, of).simplified()), first.cells)


def _gathered_pieces(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Pieces of one index, for the same tokens."""
    first, index = specs[0], _index_apart(op, specs, names)
    if index not in GATHERED:
        raise Refused(
            f"{op}: {first} was given; {index}s stay where they are: what comes after takes them as they are, or "
            "exchange them by all_to_all."
        )
    return first._replace(form=_with(first.form, index, _united_pieces(op, specs, names, index)))


def _index_apart(op: str, specs: Sequence[Spec], names: Sequence[str]) -> str:
    """The one index of which members hold other pieces, while all else is the same."""
    first = specs[0]
    for spec, name in zip(specs, names, strict=True):
        if spec.cells != first.cells or spec.form.but(slices=()) is not first.form.but(slices=()):
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; only pieces of one value, for the same tokens, are "
                "put together."
            )
    held = [dict(spec.form.slices) for spec in specs]
    apart = {index for pieces in held for index in pieces if any(other.get(index) != held[0].get(index) for other in held)}
    if not apart:
        apart = set(held[0])
    if len(apart) != 1:
        raise Refused(f"{op}: {names[0]} gave {first} and {names[-1]} {specs[-1]}; they differ in more than one index.")
    return apart.pop()


def _united_pieces(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> int:
    mask, space = 0, specs[0].form.space
    for spec, name in zip(specs, names, strict=True):
        pieces = dict(spec.form.slices).get(index, space.full(index))
        if twice := mask & pieces:
            raise Refused(
                f"{op}: {index} {listed(bits(twice))} would be counted twice ({name} and an earlier rank both have "
                "it); each slice belongs into the whole once."
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


def _scattered(op: str, total: Spec, parts: int) -> list[Spec]:
    """Equal pieces of a sum: of the parameters, or of the tokens."""
    form = total.form
    if form.kind not in ROW_KINDS:
        return [Spec(form.but(holds=holds), total.cells) for holds in form.holds.split(parts)]
    dealt = deal(total, parts)
    if dealt is None:
        raise Refused(
            f"{op}: {total} has sequences of {form.space.sequence} slices, which do not divide among {parts} ranks; "
            "scatter over an axis whose ranks divide them."
        )
    return [Spec(form, cells, joined) for cells, joined in dealt]


def deal(spec: Spec, parts: int) -> list[Joined] | None:
    """A value's cells for each of so many members: the pieces that it was joined from, or even ascending runs.

    A run is the same part of every sequence; or, where sequences are not cut, some microbatches. None if they do not
    divide.
    """
    if len(spec.joined) == parts:
        return list(spec.joined)
    space = spec.form.space
    if space.sequence > 1:
        return _runs_of_sequences(spec.cells, parts, space)
    cells = list(bits(spec.cells))
    each, rest = divmod(len(cells), parts)
    return None if rest else [(mask_of(cells[i * each : (i + 1) * each]), ()) for i in range(parts)]


def _runs_of_sequences(cells: int, parts: int, space: Space) -> list[Joined] | None:
    held: dict[int, list[int]] = {}
    for cell in bits(cells):
        held.setdefault(cell // space.sequence, []).append(cell)
    if any(len(each) % parts for each in held.values()):
        return None
    return [
        (
            mask_of(
                cell for each in held.values() for cell in each[i * len(each) // parts : (i + 1) * len(each) // parts]
            ),
            (),
        )
        for i in range(parts)
    ]


def _all_to_all(
    op: str, specs: Sequence[Spec], names: Sequence[str], indices: Mapping[tuple[Kind, int], Sequence[str]]
) -> list[Spec]:
    """Cells together and an index apart, or back again."""
    first, count = specs[0], len(specs)
    form = first.form
    may = indices.get((form.kind, form.layer), ())
    if len(may) != 1 or form.term is not None:
        raise Refused(
            f"{op}: {first} was given; an all_to_all exchanges what may be cut along another index than the batch, as "
            "experts' buffers, queries, keys and values."
        )
    (index,) = may
    for spec, name in zip(specs, names, strict=True):
        alike = spec.form.but(slices=()) is form.but(slices=())
        if not alike or spec.cells.bit_count() != first.cells.bit_count():
            raise Refused(
                f"{op}: {names[0]} gave {first} and {name} {spec}; all give equally many tokens of one value."
            )
    if count == 1:
        return list(specs)
    if all(spec.form is form for spec in specs):
        return _apart(op, specs, names, index)
    return _together(op, specs, names, index)


def _apart(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> list[Spec]:
    """Each member receives its run of the index's pieces, with the cells of all members."""
    first, count = specs[0], len(specs)
    held = list(bits(dict(first.form.slices).get(index, first.form.space.full(index))))
    each, rest = divmod(len(held), count)
    if rest:
        raise Refused(f"{op}: {len(held)} pieces of {index} do not divide among {count} ranks.")
    cells, joined = _united_cells(op, specs, names)
    runs = [mask_of(held[i * each : (i + 1) * each]) for i in range(count)]
    return [Spec(_with(first.form, index, run), cells, joined) for run in runs]


def _together(op: str, specs: Sequence[Spec], names: Sequence[str], index: str) -> list[Spec]:
    """Each member receives its cells, with the index's pieces of all members."""
    first = specs[0]
    _index_apart(op, specs, names)
    pieces = [dict(spec.form.slices).get(index, 0) for spec in specs]
    if pieces != sorted(pieces):
        raise Refused(f"{op}: the ranks have pieces of {index} in another order than the group's; meet in their order.")
    form = _with(first.form, index, _united_pieces(op, specs, names, index))
    dealt = deal(first, len(specs))
    if dealt is None:
        raise Refused(f"{op}: {first} does not divide among {len(specs)} ranks; each takes equally many tokens.")
    return [Spec(form, cells, joined) for cells, joined in dealt]


def of_microbatches(spec: Spec) -> int:
    """The microbatches that a value is about, or parts of them, as a bit set."""
    form = spec.form
    if form.kind in ROW_KINDS:
        return microbatches_of(spec.cells, form.space)
    if form.kind is not Kind.GRAD_WEIGHT:
        return 0
    cells, total = 0, form.space.cells
    summed = spec.cells
    while summed:
        cells |= summed & ((1 << total) - 1)
        summed >>= total
    return microbatches_of(cells, form.space)
