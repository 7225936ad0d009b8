"""Rules of the loss, of the gradient's norm and of the optimizer's step."""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.common.errors import About, Refused, about_layer
from shardlab.common.text import listed, plural
from shardlab.language.rules.kinds import ONE, WHOLE, Holds, Kind, Reduction, bits, in_equal_pieces
from shardlab.language.rules.refusals import missing_clause, require_kind, require_on_device, require_one_place
from shardlab.language.rules.spec import Form, Spec, form_of, summed_text


def loss(layers: int, logits: Spec, stats: Spec | None = None) -> Spec:
    """Return the gradient of the logits. If these are a slice, `stats` must be the gathered `loss_stats` of all slices.

    Raises:
        Refused: if `logits` is not the last activation or is a term of a sum; if `stats` is missing for a slice, given
            for whole logits, not gathered completely, or of other tokens.
    """
    form = logits.form
    op = About("loss", layers)
    _want_logits(op, layers, logits)
    if (stats is None) != (not form.slices):
        stats_fault = f"{logits} was given without stats" if stats is None else f"{logits} needs no stats"
        remedy = "give slices of the logits with the gathered loss_stats of all slices, and no others"
        raise Refused("wrong number", op, stats_fault, remedy)
    if stats is not None:
        if stats.kind is not Kind.STATS or stats.form.slices:
            fault = f"the stats given are {stats}"
            raise Refused("missing pieces", op, fault, "all_gather the loss_stats of all slices first")
        if stats.cells != logits.cells or stats.step != logits.step:
            fault = f"the stats are {stats} and the logits {logits}"
            raise Refused("other tokens", op, fault, "give both of the same tokens")
    return Spec(form.but(kind=Kind.GRAD_ACTIVATION), logits.cells, logits.joined)


def loss_stats(layers: int, logits: Spec) -> Spec:
    """Return the statistics of a slice of the logits that the loss needs: three numbers a token.

    Raises:
        Refused: for anything but slices of the last activation.
    """
    op = About("loss_stats", layers)
    _want_logits(op, layers, logits)
    if not logits.form.slices:
        raise Refused("other pieces", op, f"{logits} was given", f"give slices of the logits, activations[{layers}]")
    return Spec(logits.form.but(kind=Kind.STATS), logits.cells, logits.joined)


def full_sum(form: Form) -> int:
    """Return the contributions to a finished gradient, as a bit set: all cells of the batch, for each use of the weight
    and each piece of the indices in `sums`.
    """
    space = form.space
    count = space.cells * (space.uses if form.layer == 0 else 1)
    for _, pieces in form.sums:
        count *= pieces
    return (1 << count) - 1


def norm(layers: int, layer: int, gradient: Spec) -> Spec:
    """Return the sum of squares of a finished gradient: its part of the model's squared gradient norm.

    A tied weight is the parameter of two layers, so its squares count as the parts of both.

    Raises:
        Refused: for a gradient of another layer, or one that lacks microbatches.
    """
    op, form = about_layer("norm", layer), gradient.form
    _want_gradient(op, layer, gradient)
    _want_unscaled(op, gradient)
    if missing := full_sum(form) & ~gradient.cells:
        raise _missing(op, gradient, missing, "squares do not add up over microbatches")
    mask, of = form.holds
    counted = mask << layer * of
    if form.space.uses > 1 and layer == 0:
        counted |= mask << (layers - 1) * of
    return Spec(form_of(Kind.SCALAR, 0, form.step, form.space, Holds(counted, layers * of)))


def direction(
    layer: int,
    gradient: Spec,
    opt_state: Spec,
    norm: Spec | None = None,
    *,
    trained: Holds = WHOLE,
    pieces: int | None = 1,
) -> Spec:
    """Return the direction of an optimizer's step, for the optimizer state's slices.

    Muon orthogonalizes whole matrices. If matrices are cut, ranks gather the direction, and each updates its slice from
    the whole direction.

    Args:
        trained: as for `update`.
        pieces: largest number of pieces into which the layer's parameters can be cut without cutting a matrix (None:
            the optimizer updates each element by itself).

    Raises:
        Refused: if a microbatch or a slice is missing, if layers or steps differ, and if the optimizer or the layer
            needs no direction.
    """
    op = about_layer("direction", layer)
    if pieces is None:
        fault = "the optimizer steps each element of this layer by itself"
        raise Refused("cut matrices", op, fault, "leave it out, and update with the gradient alone")
    _want_finished(op, layer, gradient, (("optimizer state", opt_state, Kind.OPT_STATE),), norm, trained)
    require_on_device(op, opt_state)
    return Spec(form_of(Kind.DIRECTION, layer, gradient.step, gradient.form.space, opt_state.form.holds))


def norm_and_direction(others: Sequence[Spec]) -> tuple[Spec | None, Spec | None]:
    """Return the norm and the direction among an update's optional inputs, each None if it is missing."""
    if len(others) == 1 and others[0].kind is Kind.DIRECTION:
        return None, others[0]
    norm, direction = (*others, None, None)[:2]
    return norm, direction


def update(
    layer: int,
    gradient: Spec,
    weight: Spec,
    opt_state: Spec,
    norm: Spec | None = None,
    direction: Spec | None = None,
    *,
    trained: Holds = WHOLE,
    pieces: int | None = None,
) -> tuple[Spec, Spec]:
    """Return the new weight and optimizer state of a slice, from a gradient that has every microbatch.

    Weight and gradient may hold more slices than the optimizer state. The new weight has the state's slices.

    Args:
        direction: direction of the whole matrices to which the state's slices belong. It is not needed if the state
            holds whole matrices.
        trained: the trained layers known so far, as pieces of the model. The norm must cover all of them.
        pieces: as for `direction`.

    Raises:
        Refused: if a microbatch or a slice is missing, or if layers or steps differ.
    """
    op, form = about_layer("update", layer), gradient.form
    states = (("weight", weight, Kind.WEIGHT), ("optimizer state", opt_state, Kind.OPT_STATE))
    _want_finished(op, layer, gradient, states, norm, trained)
    holds = opt_state.form.holds
    if direction is not None:
        require_kind(op, "direction", direction, Kind.DIRECTION)
        require_one_place(op, opt_state, direction)
        if (direction.layer, direction.step) != (layer, form.step):
            fault = f"{direction} was given, with {gradient}"
            raise Refused(
                "wrong layer" if direction.layer != layer else "wrong step",
                op,
                fault,
                "give the direction of this layer and step",
            )
    if pieces is not None:
        _want_whole_matrices(op, holds, direction, holds.around(pieces))
    step = form.step + 1
    space, place = weight.form.space, weight.form.place
    new_weight, new_state = (
        form_of(kind, layer, step, space, holds, place=place) for kind in (Kind.WEIGHT, Kind.OPT_STATE)
    )
    return Spec(new_weight), Spec(new_state)


_ALL = {1: "both", 2: "all three"}


def require_no_frozen(op: About, norm: Spec, trained: Holds) -> None:
    """Refuse a norm that includes squares of frozen layers.

    Raises:
        Refused: with the frozen parts of the model.
    """
    norm_parts, trained_parts = in_equal_pieces(norm.holds, trained)
    if frozen := norm_parts.mask & ~trained_parts.mask:
        fault = (
            f"the norm given has parts {listed(bits(frozen))} of {norm_parts.of} of the model's parameters, which are "
            "frozen, since no rank loads their optimizer state"
        )
        raise Refused("frozen in the norm", op, fault, "leave frozen layers out of the norm")


def _want_logits(op: About, layers: int, logits: Spec) -> None:
    form, fault = logits.form, f"the activation given is {logits}"
    require_kind(op, "activation", logits, Kind.ACTIVATION)
    if form.layer != layers:
        raise Refused("wrong layer", op, fault, f"the loss reads the last one, activations[{layers}], give that")
    if form.term is not None:
        raise Refused("missing terms", op, fault, "reduce its terms first, over the ranks that have them")


def _want_gradient(op: About, layer: int, gradient: Spec) -> None:
    require_kind(op, "gradient", gradient, Kind.GRAD_WEIGHT, on_device=False)
    if gradient.layer != layer:
        raise Refused("wrong layer", op, f"{gradient} was given", f"give a gradient of layer {layer}")


def _missing(op: About, gradient: Spec, missing: int, reason: str) -> Refused:
    fault = f"{missing_clause(summed_text(gradient.form, missing))} from {gradient}; {reason}"
    remedy = "add or reduce the missing gradients first"
    return Refused("missing microbatches", op, fault, remedy, missing=bits(missing))


def _want_whole_matrices(op: About, holds: Holds, direction: Spec | None, whole_matrices: Holds) -> None:
    """Refuse to update a slice of a matrix without the direction of the whole matrix."""
    present, required = in_equal_pieces(holds if direction is None else direction.form.holds, whole_matrices)
    if missing := required.mask & ~present.mask:
        noun = "optimizer state" if direction is None else "direction"
        fault = f"the {noun} holds {present.slices_text}, but Muon steps whole matrices"
        remedy = (
            "all_gather rank.direction(layer, gradient, opt_state) over the ranks that have the other slices, and give "
            "it as direction; or take a plan, such as zero-3, which does so"
        )
        raise Refused("cut matrices", op, fault, remedy, missing=bits(missing))


def _want_finished(
    op: About,
    layer: int,
    gradient: Spec,
    states: Sequence[tuple[str, Spec, Kind]],
    norm: Spec | None,
    trained: Holds,
) -> None:
    """Require a finished gradient, and states of its layer and step. All must contain the slices of the last state.

    Args:
        states: (noun for messages, spec, kind to require) of each of the op's other inputs, the optimizer state last.
    """
    form = gradient.form
    if norm is not None:
        _want_norm(op, norm, form.step, trained)
    for noun, spec, kind in (("gradient", gradient, Kind.GRAD_WEIGHT), *states):
        require_kind(op, noun, spec, kind, on_device=False)
        if spec.layer != layer:
            remedy = f"update layer {layer} from its own gradient, weight and state"
            raise Refused("wrong layer", op, f"{spec} was given", remedy)
    require_one_place(op, gradient, *(spec for _, spec, _ in states))
    if any(spec.step != form.step for _, spec, _ in states):
        steps = [
            f"the {noun} {'' if index else 'is '}of step {spec.step}" for index, (noun, spec, _) in enumerate(states)
        ]
        fault = f"{', '.join(steps)} and the gradient of step {form.step}; {_ALL[len(states)]} must be of one step"
        raise Refused("wrong step", op, fault, "update each slice exactly once a step")
    if missing := full_sum(form) & ~gradient.cells:
        raise _missing(op, gradient, missing, "an update wants every microbatch exactly once")
    _want_unscaled(op, gradient)
    holds = states[-1][1].form.holds
    for noun, spec in (("gradient", gradient), *((noun, spec) for noun, spec, _ in states[:-1])):
        if spec.form.holds != holds and not spec.form.holds.contains(holds):
            value_slices, updated_slices = in_equal_pieces(spec.form.holds, holds)
            fault = f"the {noun} holds {spec.form.holds.slices_text}, but the optimizer state holds {holds.slices_text}"
            remedy = f"give a {noun} that contains every slice that is updated"
            raise Refused("missing slices", op, fault, remedy, missing=bits(updated_slices.mask & ~value_slices.mask))


def _want_norm(op: About, norm: Spec, step: int, trained: Holds) -> None:
    """Refuse a norm that is not this step's norm of all trained layers."""
    form = norm.form
    require_kind(op, "norm", norm, Kind.SCALAR)
    norm_parts, required = (form.holds, form.holds) if form.holds.complete else in_equal_pieces(form.holds, trained)
    if missing := required.mask & ~norm_parts.mask:
        parts = f"{plural('part', missing.bit_count())} {listed(bits(missing))} of {norm_parts.of}"
        fault = f"the norm given lacks {parts} of the model's parameters"
        remedy = "add and all_reduce the squares of every slice of every layer, each once"
        raise Refused("partial norm", op, fault, remedy, missing=bits(missing))
    if form.reduction is not Reduction.SUM:
        remedy = "give the sum of all squares, which alone is the gradient's norm"
        raise Refused("no sum of squares", op, f"the norm given is {norm}", remedy)
    if form.step != step:
        fault = f"the norm given is of step {form.step}, the gradient of step {step}"
        raise Refused("wrong step", op, fault, "give both of one step")


def _want_unscaled(op: About, gradient: Spec) -> None:
    if gradient.form.factor is not ONE:
        fault = (
            f"the gradient given is {gradient}, {gradient.form.factor} of the step's; losses are weighted by tokens, "
            "so the plain sum over microbatches and ranks is the mean already"
        )
        remedy = "leave out the scale, or undo it by another one before the update"
        if gradient.form.factor.ratio < 1:
            remedy = "reduce by sum, not by mean, and do not divide by a number of ranks or microbatches"
        raise Refused("scaled gradient", op, fault, remedy)
