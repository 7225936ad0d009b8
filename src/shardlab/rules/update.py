"""The rules of sums, norms, the loss and the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from shardlab.errors import About, Refused, of_layer
from shardlab.rules import attention
from shardlab.rules.dtype import DTYPES
from shardlab.rules.factor import ONE, Factor
from shardlab.rules.index import INDICES, piece_of
from shardlab.rules.kind import ROW_KINDS, Kind, Reduction
from shardlab.rules.pieces import WHOLE, Holds, bits, common, listed, numbered
from shardlab.rules.place import want_here, want_together
from shardlab.rules.spec import (
    KEY,
    Form,
    Spec,
    Term,
    form_of,
    new_spec,
    summed_text,
    term_text,
    terms_of,
    without_term,
)
from shardlab.rules.wanted import are_missing, want_alike, want_kind

GRAD_WEIGHT = Kind.GRAD_WEIGHT


def loss(layers: int, logits: Spec, stats: Spec | None = None) -> Spec:
    """The last activation makes its own gradient; slices of it do so with the statistics of all slices.

    Raises:
        Refused: for another activation, a term of it, or statistics that are missing, partial or of other tokens.
    """
    form = logits.form
    op = About("loss", layers)
    _want_logits(op, layers, logits)
    if (stats is None) != (not form.slices):
        what = f"{logits} was given without stats" if stats is None else f"{logits} needs no stats"
        remedy = "give slices of the logits with the gathered loss_stats of all slices, and no others"
        raise Refused("wrong number", op, what, remedy)
    if stats is not None:
        if stats.kind is not Kind.STATS or stats.form.slices:
            given = f"the stats given are {stats}"
            raise Refused("missing pieces", op, given, "all_gather the loss_stats of all slices first")
        if stats.cells != logits.cells or stats.step != logits.step:
            given = f"the stats are {stats} and the logits {logits}"
            raise Refused("other tokens", op, given, "give both of the same tokens")
    return Spec(form.but(kind=Kind.GRAD_ACTIVATION), logits.cells, logits.joined)


def loss_stats(layers: int, logits: Spec) -> Spec:
    """What the loss needs of some slices of the logits: three numbers a token.

    Raises:
        Refused: for anything but slices of the last activation.
    """
    op = About("loss_stats", layers)
    _want_logits(op, layers, logits)
    if not logits.form.slices:
        raise Refused("other pieces", op, f"{logits} was given", f"give slices of the logits, activations[{layers}]")
    return Spec(logits.form.but(kind=Kind.STATS), logits.cells, logits.joined)


def _want_logits(op: About, layers: int, logits: Spec) -> None:
    form, given = logits.form, f"the activation given is {logits}"
    want_kind(op, "activation", logits, Kind.ACTIVATION)
    if form.layer != layers:
        raise Refused("wrong layer", op, given, f"the loss reads the last one, activations[{layers}], give that")
    if form.term is not None:
        raise Refused("missing terms", op, given, "reduce its terms first, over the ranks that have them")


def add(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of values: of weight gradients, of scalars, or of the terms of an activation or its gradient.

    Raises:
        Refused: when the values do not belong together, are complete, or have a contribution in common.
    """
    first = specs[0]
    if first.kind is Kind.SCALAR:
        return _add_scalars(op, specs, names)
    if first.kind is GRAD_WEIGHT:
        return _add_gradients(op, specs, names)
    return _add_terms(op, specs, names)


def add_two(one: Spec, other: Spec) -> Spec:
    """The sum of two values, as ADD makes it; of what fits, as most does, without a look at what may be wrong.

    Raises:
        Refused: as `add` does.
    """
    (form, cells, _), (also, others, _) = one, other
    if form is also and form.kind is GRAD_WEIGHT and not cells & others:
        return new_spec(Spec, (form, cells | others, ()))
    term, more = form.term, also.term
    if term is not None and more is not None and cells == others and without_term(form) is without_term(also):
        both = term.bits | more.bits if term.over == more.over and not term.bits & more.bits else 0
        if both:
            return _united(one, both)
    return add(one.about("add"), (one, other), ("the first value", "the second value"))


def _add_gradients(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    first, total = specs[0], 0
    for spec, name in zip(specs, names, strict=True):
        _want_one_value(op, first, spec, names[0], name, "sum gradients of one layer")
        if spec.form is not first.form and not spec.form.holds.same(first.form.holds):
            given = f"{names[0]} gave slices {first.form.holds} and {name} {spec.form.holds}"
            raise Refused("other slices", op, given, "sum equal slices")
        if twice := total & spec.cells:
            mask = twice & -twice
            other = next(n for s, n in zip(specs, names, strict=True) if s.cells & mask)
            given = f"{summed_text(spec.form, twice)} would be counted twice ({other} and {name} both summed it)"
            raise Refused("counted twice", op, given, "let each microbatch reach a gradient once", doubled=bits(twice))
        total |= spec.cells
    return Spec(first.form, total)


def _add_terms(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    first, total = specs[0], 0
    term = first.form.term
    for spec, name in zip(specs, names, strict=True):
        _want_one_value(op, first, spec, names[0], name, "put terms of one value together")
        if spec.form.term is None or term is None:
            _refuse_no_term(op, *((spec, name) if term is not None else (first, names[0])))
        if spec.cells != first.cells or without_term(spec.form) is not without_term(first.form):
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, given, "put terms of one value together, for the same tokens")
        if spec.form.term.over != term.over:
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other sums", op, given, "sum terms of one sum")
        if twice := total & spec.form.term.bits:
            what = term_text(first.form, Term(term.over, twice))
            given = f"{what} would be counted twice ({name} and an earlier one both have it)"
            remedy = "let queries meet each block once" if term.over == KEY else "sum each term once"
            raise Refused("counted twice", op, given, remedy, doubled=bits(twice))
        total |= spec.form.term.bits
    return _united(first, total)


def _united(first: Spec, total: int) -> Spec:
    """The sum of these terms, which a first one begins."""
    term = first.form.term
    assert term is not None
    if term.over == KEY:
        return attention.unite(first, total)
    complete = total == (1 << terms_of(first.form, term)) - 1
    return first._replace(form=first.form.but(term=None if complete else term._replace(bits=total)))


def _refuse_no_term(op: About, spec: Spec, name: str) -> NoReturn:
    """Say why a value cannot be summed."""
    form = spec.form
    if form.kind not in ROW_KINDS or not (form.space.pieces or form.space.sequence > 1):
        remedy = "sum weight gradients, which are sums of contributions, and what slices of a layer make in terms"
        raise Refused("no term", op, f"{name} gave {spec}", remedy)
    if form.slices:
        (index, _), *_ = form.slices
        remedy = f"{INDICES[index].together}, or leave them where they are if the next layer takes {piece_of(index)}s"
        raise Refused(
            "no term", op, f"{name} gave {spec}, {piece_of(index)}s of the whole and no term of a sum", remedy
        )
    given = f"{name} gave {spec}, which is complete; summing it again would count it twice"
    raise Refused("no term", op, given, "use it as it is")


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
    """A gradient times a factor.

    Raises:
        Refused: for anything but a gradient, or a factor of 0.
    """
    if value.kind not in _GRADIENTS:
        remedy = "scale gradients alone, and so the loss's own"
        raise Refused("wrong kind", value.about("scale"), f"{value} was given", remedy)
    if not factor.ratio:
        raise Refused("wrong factor", value.about("scale"), "the factor is 0", "give zero_gradient instead")
    want_here(value.about("scale"), value)
    return value._replace(form=value.form.but(factor=value.form.factor * factor))


def _want_unscaled(op: About, gradient: Spec) -> None:
    if gradient.form.factor is not ONE:
        given = (
            f"the gradient given is {gradient}, {gradient.form.factor} of the step's; each microbatch's loss is "
            "weighted by its share of the step's tokens already"
        )
        raise Refused("scaled gradient", op, given, "let what the program multiplies and divides by cancel")


_CAST = _GRADIENTS | {Kind.WEIGHT, Kind.ACTIVATION, Kind.RESIDUAL, Kind.QUERIES, Kind.KEYS_VALUES}


def cast(value: Spec, dtype: str) -> Spec:
    """A value in other numbers, for the way or for a sum ("": in those of its kind again).

    Raises:
        Refused: for a dtype that there is not, for tokens, and for what is in numbers of its own: scalars, statistics
            of the loss, routing, optimizer states; and for a weight that has been updated, which is kept as it is.
    """
    op, form = value.about("cast"), value.form
    if dtype not in ("", *DTYPES):
        remedy = f"give one of {', '.join(DTYPES)}, or none to cast back"
        raise Refused("other dtypes", op, f"{dtype!r} was given", remedy)
    if form.kind not in _CAST or (form.layer == 0 and form.kind in (Kind.ACTIVATION, Kind.GRAD_ACTIVATION)):
        given = f"{value} was given, which is in numbers of its own"
        raise Refused("wrong kind", op, given, "cast weights, activations or gradients")
    if form.kind is Kind.WEIGHT and form.step:
        given = f"{value} was given, which this step has updated; what is rounded now would be lost for ever"
        raise Refused("wrong step", op, given, "leave it as it is, and cast it where it is used in the next step")
    want_here(op, value)
    return value._replace(form=form.but(dtype=dtype))


def _want_one_value(op: About, first: Spec, spec: Spec, one: str, other: str, remedy: str) -> None:
    want_alike(op, first, spec, one, other)
    if spec.kind is not first.kind or spec.layer != first.layer or spec.step != first.step:
        raise Refused("other values", op, f"{one} gave {first} and {other} {spec}", remedy)


def _add_scalars(op: About, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of sums of squares: each parameter may be in it once, so replicas must not be added up."""
    first = specs[0]
    mask, of = 0, 1
    for spec, name in zip(specs, names, strict=True):
        form = spec.form
        if form.kind is not Kind.SCALAR or form.step != first.step:
            given = f"{names[0]} gave {first} and {name} {spec}"
            raise Refused("other values", op, given, "sum scalars of one step")
        if form.reduction is not Reduction.SUM:
            given = f"{name} gave {spec}, and only sums of squares add up to a norm"
            raise Refused("no sum of squares", op, given, "give that of the gradients")
        mine, theirs = common(Holds(mask, of), form.holds)
        if twice := mine.mask & theirs.mask:
            given = (
                f"{numbered('part', twice)} of {mine.of} of the model would come from {name} and from an earlier one "
                "as well; each parameter's square counts once"
            )
            raise Refused("counted twice", op, given, "sum replicas on one of them", doubled=bits(twice))
        mask, of = mine.mask | theirs.mask, mine.of
    return Spec(first.form.but(holds=Holds(mask, of)))


def full_sum(form: Form) -> int:
    """What a finished gradient has summed: every cell of the batch, of every use and everything summed beside."""
    space = form.space
    count = space.cells * (space.uses if form.layer == 0 else 1)
    for _, pieces in form.over:
        count *= pieces
    return (1 << count) - 1


def norm(layers: int, layer: int, gradient: Spec) -> Spec:
    """The squares of a finished gradient's elements, summed: their part of the model's squared gradient norm.

    A tied weight is a parameter of two layers; its squares stand for both.

    Raises:
        Refused: for a gradient of another layer, or one that lacks microbatches.
    """
    op, form = of_layer("norm", layer), gradient.form
    _want_gradient(op, layer, gradient)
    _want_unscaled(op, gradient)
    if missing := full_sum(form) & ~gradient.cells:
        raise _missing(op, gradient, missing, "squares do not add up over microbatches")
    mask, of = form.holds
    counted = mask << layer * of
    if form.space.uses > 1 and layer == 0:
        counted |= mask << (layers - 1) * of
    return Spec(form_of(Kind.SCALAR, 0, form.step, form.space, Holds(counted, layers * of)))


def _want_gradient(op: About, layer: int, gradient: Spec) -> None:
    want_kind(op, "gradient", gradient, Kind.GRAD_WEIGHT, here=False)
    if gradient.layer != layer:
        raise Refused("wrong layer", op, f"{gradient} was given", f"give a gradient of layer {layer}")


def _missing(op: About, gradient: Spec, missing: int, why: str) -> Refused:
    given = f"{are_missing(summed_text(gradient.form, missing))} from {gradient}; {why}"
    remedy = "add or reduce the missing gradients first"
    return Refused("missing microbatches", op, given, remedy, missing=bits(missing))


def update(
    layer: int, gradient: Spec, weight: Spec, opt_state: Spec, norm: Spec | None = None, trained: Holds = WHOLE
) -> tuple[Spec, Spec]:
    """A gradient with every microbatch in it moves an optimizer state and that slice of the weight one step on.

    Weight and gradient may hold more than the state; the new weight is the state's slice alone.

    Args:
        trained: the layers that are known to be trained, as pieces of the model; the norm must be of all of them.

    Raises:
        Refused: naming what is missing, of another layer or step, or not held.
    """
    op, form = of_layer("update", layer), gradient.form
    if norm is not None:
        _want_norm(op, norm, form.step, trained)
    wanted = (
        ("gradient", gradient, Kind.GRAD_WEIGHT),
        ("weight", weight, Kind.WEIGHT),
        ("optimizer state", opt_state, Kind.OPT_STATE),
    )
    for what, spec, kind in wanted:
        want_kind(op, what, spec, kind, here=False)
        if spec.layer != layer:
            remedy = f"update layer {layer} from its own gradient, weight and state"
            raise Refused("wrong layer", op, f"{spec} was given", remedy)
    want_together(op, gradient, weight, opt_state)
    if not weight.step == opt_state.step == form.step:
        given = (
            f"the weight is of step {weight.step}, the optimizer state of step {opt_state.step} and the gradient of "
            f"step {form.step}; all three must be of one step"
        )
        raise Refused("wrong step", op, given, "update each slice exactly once a step")
    if missing := full_sum(form) & ~gradient.cells:
        raise _missing(op, gradient, missing, "an update wants every microbatch exactly once")
    _want_unscaled(op, gradient)
    held = opt_state.form.holds
    for what, spec in (("gradient", gradient), ("weight", weight)):
        if spec.form.holds != held and not spec.form.holds.contains(held):
            theirs, mine = common(spec.form.holds, held)
            given = f"the {what} holds slices {spec.form.holds}, but the optimizer state holds {held}"
            remedy = f"give a {what} that contains every slice that is updated"
            raise Refused("missing slices", op, given, remedy, missing=bits(mine.mask & ~theirs.mask))
    step = form.step + 1
    space, place = weight.form.space, weight.form.place
    new_weight, new_state = (
        form_of(kind, layer, step, space, held, place=place) for kind in (Kind.WEIGHT, Kind.OPT_STATE)
    )
    return Spec(new_weight), Spec(new_state)


def want_no_frozen(op: About, norm: Spec, trained: Holds) -> None:
    """Refuse a norm that has squares of layers that are not trained.

    Raises:
        Refused: naming the parts of the model that are too many.
    """
    mine, wanted = common(norm.holds, trained)
    if frozen := mine.mask & ~wanted.mask:
        given = (
            f"the norm given has parts {listed(bits(frozen))} of {mine.of} of the model's parameters, which are "
            "frozen, since no rank loads their optimizer state"
        )
        raise Refused("frozen in the norm", op, given, "leave frozen layers out of the norm")


def _want_norm(op: About, norm: Spec, step: int, trained: Holds) -> None:
    """Refuse what is not this step's gradient norm of all layers that are trained."""
    form = norm.form
    want_kind(op, "norm", norm, Kind.SCALAR)
    mine, wanted = (form.holds, form.holds) if form.holds.complete else common(form.holds, trained)
    if missing := wanted.mask & ~mine.mask:
        given = f"the norm given lacks parts {listed(bits(missing))} of {mine.of} of the model's parameters"
        remedy = "add and all_reduce the squares of every slice of every layer, each once"
        raise Refused("partial norm", op, given, remedy, missing=bits(missing))
    if form.reduction is not Reduction.SUM:
        remedy = "give the sum of all squares, which alone is the gradient's norm"
        raise Refused("no sum of squares", op, f"the norm given is {norm}", remedy)
    if form.step != step:
        given = f"the norm given is of step {form.step}, the gradient of step {step}"
        raise Refused("wrong step", op, given, "give both of one step")
