"""Rules of sums, of scaling and of casts."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import NoReturn

from shardlab.common.errors import About, Refused
from shardlab.language.rules import attention
from shardlab.language.rules.kinds import (
    DTYPES,
    INDICES,
    MOST_DOUBLINGS,
    MOST_DOUBLINGS_IN_FLOAT16,
    ONE,
    ROW_KINDS,
    Factor,
    Holds,
    Kind,
    Reduction,
    bits,
    factor_of,
    in_equal_pieces,
    numbered,
    piece_noun,
)
from shardlab.language.rules.refusals import require_compatible, require_on_device
from shardlab.language.rules.spec import KEY, Spec, Term, count_terms, new_spec, summed_text, term_text, without_term

GRAD_WEIGHT = Kind.GRAD_WEIGHT


def add(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the sum of weight gradients, of scalars, or of the terms of an activation or its gradient.

    Raises:
        Refused: if the values do not belong together, are complete, or have a contribution in common.
    """
    first = specs[0]
    if first.kind is Kind.SCALAR:
        return _add_scalars(op, specs, names)
    if first.kind is GRAD_WEIGHT:
        return _add_gradients(op, specs, names)
    return _add_terms(op, specs, names)


def add_two(one: Spec, other: Spec) -> Spec:
    """Return the sum of two values, as ADD computes it. The common cases skip the checks of `add`.

    Raises:
        Refused: as `add` does.
    """
    (form, cells, _), (form_b, cells_b, _) = one, other
    if form is form_b and form.kind is GRAD_WEIGHT and not cells & cells_b:
        return new_spec(Spec, (form, cells | cells_b, ()))
    term, term_b = form.term, form_b.term
    if term is not None and term_b is not None and cells == cells_b and without_term(form) is without_term(form_b):
        union = term.bits | term_b.bits if term.indices == term_b.indices and not term.bits & term_b.bits else 0
        if union:
            return _sum_of_terms(one, union)
    return add(one.about("add"), (one, other), ("the first value", "the second value"))


_GRADIENTS = frozenset(
    {
        Kind.GRAD_WEIGHT,
        Kind.GRAD_ACTIVATION,
        Kind.GRAD_RESIDUAL,
        Kind.GRAD_ROUTING,
        Kind.GRAD_QUERIES,
        Kind.GRAD_KEYS_VALUES,
    }
)


def scale(value: Spec, factor: Factor) -> Spec:
    """Return a gradient times a factor.

    Raises:
        Refused: for any other kind of value, for a factor of 0, and for a factor that would make gradients overflow or
            vanish, alone or with the factors before it.
    """
    if value.kind not in _GRADIENTS:
        remedy = "scale only gradients; scaling the loss's gradient scales all of them"
        raise Refused("wrong kind", value.about("scale"), f"{value} was given", remedy)
    if not factor.ratio:
        raise Refused("wrong factor", value.about("scale"), "the factor is 0", "give zero_gradient instead")
    require_on_device(value.about("scale"), value)
    require_representable(value.about("scale"), factor, value.form.dtype)
    return apply_factor(value.about("scale"), value, factor)


def apply_factor(op: About, value: Spec, factor: Factor) -> Spec:
    """Return the spec of a gradient that an op has multiplied by a factor.

    Raises:
        Refused: for a factor that would make gradients overflow or vanish, alone or with the factors before it.
    """
    total = value.form.factor * factor
    require_representable(op, total, value.form.dtype)
    return value._replace(form=value.form.but(factor=total))


def require_representable(op: About, factor: Factor, dtype: str) -> None:
    """Refuse a factor that would make gradients overflow or vanish in a dtype.

    Raises:
        Refused: with the size of the factor.
    """
    if excess := factor.why_out_of_range(MOST_DOUBLINGS_IN_FLOAT16 if dtype == "float16" else MOST_DOUBLINGS):
        fault = f"the gradient would be multiplied by {excess}; {dtype or 'its numbers'} would overflow or be lost"
        raise Refused("wrong factor", op, fault, "scale by less, and cancel it before more is multiplied")


_CAST = _GRADIENTS | {Kind.WEIGHT, Kind.ACTIVATION, Kind.RESIDUAL, Kind.QUERIES, Kind.KEYS_VALUES}


def cast(value: Spec, dtype: str) -> Spec:
    """Return a value in another dtype, for communication or for a sum ("": in the dtype of its kind).

    Raises:
        Refused: for an unknown dtype; for tokens; for values whose dtype is fixed (scalars, statistics of the loss,
            routing, optimizer states); and for an updated weight, which would lose bits for the next step.
    """
    op, form = value.about("cast"), value.form
    if dtype not in ("", *DTYPES):
        remedy = f"give one of {', '.join(DTYPES)}, or none to cast back"
        raise Refused("other dtypes", op, f"{dtype!r} was given", remedy)
    if form.kind not in _CAST or (form.layer == 0 and form.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION)):
        fault = f"{value} was given, whose dtype is fixed"
        raise Refused("wrong kind", op, fault, "cast weights, activations or gradients")
    if form.kind is Kind.WEIGHT and form.step:
        fault = f"{value} was given, which this step has updated; a cast would lose its last bits for ever"
        raise Refused("wrong step", op, fault, "leave it as it is, and cast it where it is used in the next step")
    require_on_device(op, value)
    require_representable(op, form.factor, dtype)
    return value._replace(form=form.but(dtype=dtype))


def _add_gradients(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    first, total = specs[0], 0
    factor = _factor_of_shares(specs)
    for spec, name in zip(specs, names, strict=True):
        comparable = spec if factor is None else spec._replace(form=spec.form.but(factor=first.form.factor))
        _want_one_value(op, first, comparable, names[0], name, "sum gradients of one layer")
        if spec.form is not first.form and not spec.form.holds.equals(first.form.holds):
            fault = f"{names[0]} gave {first.form.holds.slices_text} and {name} gave {spec.form.holds.slices_text}"
            raise Refused("other slices", op, fault, "sum equal slices, or join different ones by rank.concatenate")
        if (twice := total & spec.cells) and factor is None:
            mask = twice & -twice
            other = next(n for s, n in zip(specs, names, strict=True) if s.cells & mask)
            fault = f"{summed_text(spec.form, twice)} would be counted twice (in {other} and in {name})"
            raise Refused("counted twice", op, fault, "let each microbatch reach a gradient once", doubled=bits(twice))
        total |= spec.cells
    return Spec(first.form if factor is None else first.form.but(factor=factor), total)


def _factor_of_shares(specs: Sequence[Spec]) -> Factor | None:
    """Return the factor of a sum of scaled gradients with the same contributions, such as two halves.

    For each contribution the factors of the values that contain it are added up.

    Returns:
        The factor of the sum; None if the contributions have different factors, if no contribution occurs twice, or if
        a value is not scaled.
    """
    (_, tokens), *others = [(spec.form.factor.ratio, spec.form.factor.tokens) for spec in specs]
    if any(spec.form.factor is ONE for spec in specs) or any(other_tokens != tokens for _, other_tokens in others):
        return None
    ratios: dict[int, Fraction] = {}  # disjoint bit sets of contributions
    overlaps = False
    for spec in specs:
        rest, ratio, previous = spec.cells, spec.form.factor.ratio, ratios
        ratios = {}
        for cells, total in previous.items():
            shared_cells, other_cells = cells & spec.cells, cells & ~spec.cells
            overlaps |= bool(shared_cells)
            ratios |= {part: value for part, value in ((shared_cells, total + ratio), (other_cells, total)) if part}
            rest &= ~cells
        if rest:
            ratios[rest] = ratio
    if not overlaps or len(set(ratios.values())) > 1 or not all(ratios.values()):
        return None
    return factor_of(next(iter(ratios.values())), tokens)


def _add_terms(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    first, total = specs[0], 0
    term = first.form.term
    for spec, name in zip(specs, names, strict=True):
        _want_one_value(op, first, spec, names[0], name, "put terms of one value together")
        if spec.form.term is None or term is None:
            _refuse_no_term(op, *((spec, name) if term is not None else (first, names[0])))
        if spec.cells != first.cells or without_term(spec.form) is not without_term(first.form):
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, fault, "put terms of one value together, for the same tokens")
        if spec.form.term.indices != term.indices:
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other sums", op, fault, "sum terms of one sum")
        if twice := total & spec.form.term.bits:
            overlap_text = term_text(first.form, Term(term.indices, twice))
            fault = f"{overlap_text} would be counted twice ({name} and an earlier one both have it)"
            remedy = "let queries meet each block once" if term.indices == KEY else "sum each term once"
            raise Refused("counted twice", op, fault, remedy, doubled=bits(twice))
        total |= spec.form.term.bits
    return _sum_of_terms(first, total)


def _sum_of_terms(first: Spec, total: int) -> Spec:
    """Return the spec of a sum of terms: the first one's, with the bit set `total` of all summed pieces."""
    term = first.form.term
    assert term is not None
    if term.indices == KEY:
        return attention.record_met_slices(first, total)
    complete = total == (1 << count_terms(first.form, term)) - 1
    return first._replace(form=first.form.but(term=None if complete else term._replace(bits=total)))


def _refuse_no_term(op: About, spec: Spec, name: str) -> NoReturn:
    """Refuse a value that is not a term of a sum, with the reason."""
    form = spec.form
    if form.kind not in ROW_KINDS or not (form.space.pieces or form.space.sequence > 1):
        remedy = "only gradients of weights are summed, and partial results of sliced layers; give one of these"
        raise Refused("no term", op, f"{name} gave {spec}", remedy)
    if form.slices:
        (index, _), *_ = form.slices
        remedy = f"{INDICES[index].together}, or leave them where they are if the next layer takes {piece_noun(index)}s"
        raise Refused(
            "no term", op, f"{name} gave {spec}, {piece_noun(index)}s of the whole and no term of a sum", remedy
        )
    fault = f"{name} gave {spec}, which is complete; summing it again would count it twice"
    raise Refused("no term", op, fault, "use it as it is")


def _want_one_value(op: About, first: Spec, spec: Spec, one: str, other: str, remedy: str) -> None:
    require_compatible(op, first, spec, one, other)
    if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
        raise Refused("other values", op, f"{one} gave {first} and {other} {spec}", remedy)


def _add_scalars(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """Return the sum of sums of squares. Each parameter may occur once in it, so replicas must not be added up."""
    first = specs[0]
    mask, of = 0, 1
    for spec, name in zip(specs, names, strict=True):
        form = spec.form
        if form.kind is not Kind.SCALAR or form.step != first.step:
            fault = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, fault, "sum scalars of one step")
        if form.reduction is not Reduction.SUM:
            fault = f"{name} gave {spec}, and only sums of squares add up to a norm"
            raise Refused("no sum of squares", op, fault, "give the sum of squares of the gradients")
        sum_parts, new_parts = in_equal_pieces(Holds(mask, of), form.holds)
        if twice := sum_parts.mask & new_parts.mask:
            fault = (
                f"{numbered('part', twice)} of {sum_parts.of} of the model would come from {name} and from an earlier "
                "one as well; each parameter's square counts once"
            )
            raise Refused("counted twice", op, fault, "count replicas on one rank only", doubled=bits(twice))
        mask, of = sum_parts.mask | new_parts.mask, sum_parts.of
    return Spec(first.form.but(holds=Holds(mask, of)))
