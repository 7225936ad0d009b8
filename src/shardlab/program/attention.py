"""The rules of attention over sequences that are cut, by which context parallelism is checked (Liu et al. 2023, arXiv
2310.01889, section 3; Llama 3, arXiv 2407.21783, section 3.3.2).

A PROJECT layer makes queries, keys and values of any tokens. Queries then *meet* blocks of keys and values: what comes
out is complete when they have met, each once, all slices of the sequence up to their own last one; later ones are
masked and need not be met. In the backward pass a block's gradient is complete when all queries from its own first
slice on have met it. Which slices have been met so far stands in *sums*, from bit `grid.width` on; 0 means all.
With tensor parallelism a rank has slices of the heads, of queries as of keys and values; they are the bits below.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.sliced import held_by, slices_of
from shardlab.program.values import Holds, Kind, Spec, bits, listed, mask_of, pieces_text
from shardlab.program.wants import want_kind


def balanced(place: int, ranks: int, pieces: int = 1) -> tuple[int, ...]:
    """An early and a late slice of every sequence, of 2 x ranks: so each rank has as much causal attention to compute.

    Where sequences are counted in finer slices, each of these is so many `pieces`.

    >>> [balanced(place, 3) for place in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    >>> balanced(0, 2, pieces=2)
    (0, 1, 6, 7)
    """
    early, late = place * pieces, (2 * ranks - 1 - place) * pieces
    return *range(early, early + pieces), *range(late, late + pieces)


def balanced_parts(holds: Holds, parts: int, slices: int) -> list[Holds]:
    """What is held, dealt among ranks in the balanced order; none if it is not all that such ranks have."""
    pieces, rest = divmod(slices, 2 * parts)
    own = [balanced(place, parts, pieces) for place in range(parts)]
    dealt = [mask_of(piece for piece in bits(holds.mask) if piece % slices in mine) for mine in own]
    if rest or len({mask.bit_count() for mask in dealt}) > 1:
        return []
    return [Holds(mask, holds.of) for mask in dealt]


def project(layer: int, activation: Spec, weight: Spec) -> tuple[Spec, Spec]:
    """Normalised tokens to their queries, and to their keys and values: the heads of the weight's slices."""
    op = f"project(layer {layer})"
    _want(op, "activation", activation, Kind.ACTIVATION, layer)
    heads = slices_of(op, layer, layer, weight, activation)
    return activation._replace(kind=Kind.QUERIES, sums=heads), activation._replace(kind=Kind.KEYS_VALUES, sums=heads)


def project_backward(
    layer: int, activation: Spec, grad_queries: Spec, grad_keys_values: Spec, weight: Spec
) -> tuple[Spec, Spec]:
    """The gradients of a PROJECT layer's parameters and of its input (terms of it, if the weight has slices), from
    complete gradients of what it made."""
    op = f"backward_project(layer {layer})"
    _want(op, "activation", activation, Kind.ACTIVATION, layer)
    heads = slices_of(op, layer, layer, weight, activation)
    _want_gradients(op, layer, activation, grad_queries, heads)
    _want(op, "gradient of keys and values", grad_keys_values, Kind.GRAD_KEYS_VALUES, layer, heads)
    _want_same(op, "gradient of keys and values", grad_keys_values, "activation", activation)
    return _grad_weight(activation, weight.holds), activation._replace(kind=Kind.GRAD_ACTIVATION, sums=heads)


def project_backward_weight(layer: int, activation: Spec, grad_queries: Spec, heads: int = 0) -> Spec:
    """The half of it that gives the parameters' gradient; the first half has seen the keys' and values', and by which
    slices it was (0: all)."""
    _want_gradients(f"backward_weight(layer {layer})", layer, activation, grad_queries, heads)
    return _grad_weight(activation, held_by(heads, activation.grid))


def attend(layer: int, queries: Spec, keys_values: Spec) -> Spec:
    """Queries that have met these keys and values: the activation that the next layer reads, or a part of it."""
    op = f"attend(layer {layer})"
    ours, theirs = _want_pair(op, layer, queries, keys_values)
    made = queries._replace(kind=Kind.ACTIVATION, layer=layer + 1)
    return _with(made, theirs & _needed(Kind.ACTIVATION, ours, queries.grid.sequence))


def attend_backward(layer: int, queries: Spec, keys_values: Spec, attended: Spec, gradient: Spec) -> tuple[Spec, Spec]:
    """What these keys and values give to the queries' gradient, and these queries to the keys' and values'."""
    op = f"attend_backward(layer {layer})"
    ours, theirs = _want_pair(op, layer, queries, keys_values)
    _want(op, "activation", attended, Kind.ACTIVATION, layer + 1, queries.parts)
    _want_same(op, "activation", attended, "queries", queries)
    _want(op, "gradient", gradient, Kind.GRAD_ACTIVATION, layer + 1, queries.parts)
    _want_same(op, "gradient", gradient, "queries", queries)
    slices = queries.grid.sequence
    return (
        _with(queries._replace(kind=Kind.GRAD_QUERIES), theirs & _needed(Kind.GRAD_QUERIES, ours, slices)),
        _with(
            keys_values._replace(kind=Kind.GRAD_KEYS_VALUES),
            ours & _needed(Kind.GRAD_KEYS_VALUES, theirs, slices),
        ),
    )


def met(spec: Spec) -> int:
    """The slices of the sequence that an incomplete value has met, as a bit set (0: it is complete)."""
    return spec.sums >> spec.grid.width


def work(queries: Spec, keys_values: Spec) -> float:
    """Attention of these queries to these keys and values, in units of one whole sequence's causal attention.

    A slice sees all of an earlier one, half of itself, and nothing of a later one.
    """
    (ours,), (theirs,) = {*_slices(queries).values()}, {*_slices(keys_values).values()}
    seen = sum((1.0 if key < query else 0.5) for query in bits(ours) for key in bits(theirs) if key <= query)
    return len(_slices(queries)) * seen / (queries.grid.sequence**2 / 2)


def in_parts(spec: Spec) -> bool:
    """Whether it is told by what it has met."""
    return spec.kind in (Kind.GRAD_QUERIES, Kind.GRAD_KEYS_VALUES) or (spec.kind is Kind.ACTIVATION and met(spec) > 0)


def unite(op: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of parts: of the same tokens, each of which has met other slices."""
    first = specs[0]
    total = 0
    for spec, name in zip(specs, names, strict=True):
        alike = spec.kind is first.kind and spec.layer == first.layer and spec.step == first.step
        if not alike or spec.holds != first.holds or spec.parts != first.parts:
            raise Refused(f"{op}: {names[0]} gave {first} and {name} {spec}; only parts of one value are put together.")
        if not met(spec):
            raise Refused(f"{op}: {name} gave {spec}, which is complete; nothing more may be added to it.")
        if twice := total & met(spec):
            raise Refused(
                f"{op}: {_said(twice)} would be counted twice ({name} and an earlier one "
                f"both have them in {first.kind.value}[{first.layer}]); queries meet each block once."
            )
        total |= met(spec)
    return _with(first, total)


def _with(spec: Spec, total: int) -> Spec:
    """The value with these slices met; none stand there once all that it needs are in. Its heads are what they were."""
    return spec._replace(sums=spec.parts | (0 if _needs(spec) & ~total == 0 else total << spec.grid.width))


def _needs(spec: Spec) -> int:
    """What a value must meet, be it of one microbatch's tokens or another's."""
    needs = 0
    for held in _slices(spec).values():
        needs |= _needed(spec.kind, held, spec.grid.sequence)
    return needs


def _needed(kind: Kind, held: int, slices: int) -> int:
    """What tokens of some slices must meet: blocks up to the last of them, or queries from the first of them on."""
    if kind is Kind.GRAD_KEYS_VALUES:
        return (1 << slices) - (held & -held)
    return (1 << held.bit_length()) - 1


def _slices(spec: Spec) -> dict[int, int]:
    """For each microbatch that is held, its slices as a bit set."""
    slices: dict[int, int] = {}
    for piece in bits(spec.holds.mask):
        microbatch, number = divmod(piece, spec.grid.sequence)
        slices[microbatch] = slices.get(microbatch, 0) | 1 << number
    return slices


def _want_pair(op: str, layer: int, queries: Spec, keys_values: Spec) -> tuple[int, int]:
    """Queries and keys of the same microbatches, some of which are not masked; the slices of either."""
    _want(op, "first value", queries, Kind.QUERIES, layer, queries.parts)
    _want(op, "second value", keys_values, Kind.KEYS_VALUES, layer, queries.parts)
    ours, theirs = _slices(queries), _slices(keys_values)
    if ours.keys() != theirs.keys() or queries.step != keys_values.step:
        raise Refused(f"{op}: {queries} cannot meet {keys_values}; both must be of the same microbatches and step.")
    for spec, held in ((queries, ours), (keys_values, theirs)):
        if len(set(held.values())) > 1:
            raise Refused(f"{op}: {spec} was given; attention takes the same slices of each microbatch.")
    (mine,), (block,) = {*ours.values()}, {*theirs.values()}
    if not block & _needed(Kind.ACTIVATION, mine, queries.grid.sequence):
        raise Refused(f"{op}: all of {keys_values} comes after {queries}, which do not see it; leave this op out.")
    return mine, block


def _want_gradients(op: str, layer: int, activation: Spec, grad_queries: Spec, heads: int) -> None:
    _want(op, "activation", activation, Kind.ACTIVATION, layer)
    _want(op, "gradient of queries", grad_queries, Kind.GRAD_QUERIES, layer, heads)
    _want_same(op, "gradient of queries", grad_queries, "activation", activation)


def _want(op: str, what: str, got: Spec, kind: Kind, layer: int, heads: int = 0) -> None:
    """A value of this kind and number that has met all that it must, of some slices of the heads (0: all)."""
    want_kind(op, what, got, kind)
    if got.layer != layer:
        raise Refused(f"{op}: the {what} given is {got}; this op reads {kind.value}[{layer}].")
    if met(got):
        missing = _needs(got) & ~met(got)
        who = "the queries" if kind is Kind.GRAD_KEYS_VALUES else "the keys and values"
        raise Refused(f"{op}: the {what} given is {got}; {who} of {_said(missing)} are missing in it.")
    if got.parts != heads:
        wanted = f"slices {listed(bits(heads))}" if heads else "all slices"
        raise Refused(
            f"{op}: the {what} given is {got}; {wanted} of {got.grid.width} are wanted. Slices of attention take their "
            "own heads and no others, and norms what is complete: reduce terms first."
        )


def _want_same(op: str, what: str, one: Spec, other_what: str, other: Spec) -> None:
    if one.holds != other.holds or one.step != other.step:
        raise Refused(
            f"{op}: the {what} is of {pieces_text(one.holds.mask, one.grid)} and the {other_what} of "
            f"{pieces_text(other.holds.mask, other.grid)}; both must be of the same tokens and step."
        )


def _said(slices: int) -> str:
    return f"slice{'s' * (slices.bit_count() > 1)} {listed(bits(slices))} of the sequence"


def _grad_weight(activation: Spec, holds: Holds) -> Spec:
    return activation._replace(kind=Kind.GRAD_WEIGHT, holds=holds, sums=activation.holds.mask)
