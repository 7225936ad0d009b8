"""The rules of attention over sequences that are cut, by which context parallelism is checked (Liu et al. 2023, arXiv
2310.01889, section 3; Llama 3, arXiv 2407.21783, section 3.3.2).

A PROJECT layer makes queries, keys and values of any tokens. Queries then *meet* blocks of keys and values: what comes
out is complete when they have met, each once, all slices of the sequence up to their own last one; later ones are
masked and need not be met. In the backward pass a block's gradient is complete when all queries from its own first
slice on have met it. Which slices have been met so far stands in *sums*, from bit `grid.width` on; 0 means all.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.values import WHOLE, Holds, Kind, Spec, bits, listed, mask_of, pieces_text
from shardlab.program.wants import want_kind, want_weight


def balanced(place: int, ranks: int) -> tuple[int, int]:
    """An early and a late slice of every sequence, of 2 x ranks: so each rank has as much causal attention to compute.

    >>> [balanced(place, 3) for place in range(3)]
    [(0, 5), (1, 4), (2, 3)]
    """
    return place, 2 * ranks - 1 - place


def balanced_parts(holds: Holds, parts: int, slices: int) -> list[Holds]:
    """What is held, dealt among ranks in the balanced order; none if it is not all that such ranks have."""
    dealt = [mask_of(p for p in bits(holds.mask) if p % slices in balanced(place, parts)) for place in range(parts)]
    if slices != 2 * parts or len({mask.bit_count() for mask in dealt}) > 1:
        return []
    return [Holds(mask, holds.of) for mask in dealt]


def project(layer: int, activation: Spec, weight: Spec) -> tuple[Spec, Spec]:
    """Normalised tokens to their queries, and to their keys and values."""
    _want(f"project(layer {layer})", "activation", activation, Kind.ACTIVATION, layer)
    want_weight(f"project(layer {layer})", layer, weight, activation.step)
    return activation._replace(kind=Kind.QUERIES), activation._replace(kind=Kind.KEYS_VALUES)


def project_backward(
    layer: int, activation: Spec, grad_queries: Spec, grad_keys_values: Spec, weight: Spec
) -> tuple[Spec, Spec]:
    """The gradients of a PROJECT layer's parameters and of its input, from complete gradients of what it made."""
    op = f"backward_project(layer {layer})"
    _want_gradients(op, layer, activation, grad_queries)
    want_weight(op, layer, weight, activation.step)
    _want(op, "gradient of keys and values", grad_keys_values, Kind.GRAD_KEYS_VALUES, layer)
    _want_same(op, "gradient of keys and values", grad_keys_values, "activation", activation)
    return _grad_weight(activation), activation._replace(kind=Kind.GRAD_ACTIVATION)


def project_backward_weight(layer: int, activation: Spec, grad_queries: Spec) -> Spec:
    """The half of it that gives the parameters' gradient; the first half has seen the keys' and values'."""
    _want_gradients(f"backward_weight(layer {layer})", layer, activation, grad_queries)
    return _grad_weight(activation)


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
    _want(op, "activation", attended, Kind.ACTIVATION, layer + 1)
    _want_same(op, "activation", attended, "queries", queries)
    _want(op, "gradient", gradient, Kind.GRAD_ACTIVATION, layer + 1)
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
        if not alike or spec.holds != first.holds:
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
    """The value with these slices met; none stand there once all that it needs are in."""
    return spec._replace(sums=0 if _needs(spec) & ~total == 0 else total << spec.grid.width)


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
    _want(op, "first value", queries, Kind.QUERIES, layer)
    _want(op, "second value", keys_values, Kind.KEYS_VALUES, layer)
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


def _want_gradients(op: str, layer: int, activation: Spec, grad_queries: Spec) -> None:
    _want(op, "activation", activation, Kind.ACTIVATION, layer)
    _want(op, "gradient of queries", grad_queries, Kind.GRAD_QUERIES, layer)
    _want_same(op, "gradient of queries", grad_queries, "activation", activation)


def _want(op: str, what: str, got: Spec, kind: Kind, layer: int) -> None:
    """A complete value of this kind and number."""
    want_kind(op, what, got, kind)
    if got.layer != layer:
        raise Refused(f"{op}: the {what} given is {got}; this op reads {kind.value}[{layer}].")
    if got.sums:
        missing = _needs(got) & ~met(got)
        who = "the queries" if kind is Kind.GRAD_KEYS_VALUES else "the keys and values"
        raise Refused(f"{op}: the {what} given is {got}; {who} of {_said(missing)} are missing in it.")


def _want_same(op: str, what: str, one: Spec, other_what: str, other: Spec) -> None:
    if one.holds != other.holds or one.step != other.step:
        raise Refused(
            f"{op}: the {what} is of {pieces_text(one.holds.mask, one.grid)} and the {other_what} of "
            f"{pieces_text(other.holds.mask, other.grid)}; both must be of the same tokens and step."
        )


def _said(slices: int) -> str:
    return f"slice{'s' * (slices.bit_count() > 1)} {listed(bits(slices))} of the sequence"


def _grad_weight(activation: Spec) -> Spec:
    return activation._replace(kind=Kind.GRAD_WEIGHT, holds=WHOLE, sums=activation.holds.mask)
