"""The rules of sliced layers and half-blocks, by which tensor and sequence parallelism are checked (Shoeybi et al.
2019, arXiv 1909.08053, section 3; Korthikanti et al. 2022, arXiv 2205.05198, section 4.2).

A SLICED layer with some slices of its parameters makes these slices' terms of a sum, from complete sequences; the
gradient of its input is a sum of terms too. It is two matrices in one: a COLUMN, which makes slices of its output that
lie side by side, and a ROW, which takes them and makes terms; backward, the ROW makes slices and the COLUMN terms. A
NORM layer adds a complete branch to the residual and normalises, on any slice of the sequence. So *sums* tells which
slices are there, and *holds* which tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardlab.program.errors import Refused
from shardlab.program.sizes import LayerKind, side_by_side
from shardlab.program.values import WHOLE, Grid, Holds, Kind, Spec, listed
from shardlab.program.wants import want_kind, want_weight


def owner_of(layer: int, layers: int, grid: Grid) -> int:
    """The layer whose weight a layer computes with: its own, but the embedding's for a head that is tied to it."""
    return 0 if grid.tied and layer == layers - 1 else layer


Kinds = Sequence[LayerKind]
"""Each layer's kind; none: all are SLICED."""


def forward(layer: int, activation: Spec, weight: Spec, op: str = "forward", *, layers: int, kinds: Kinds = ()) -> Spec:
    """Some slices of a layer: their terms of its output, or of a COLUMN, and of the last layer, their slices of it."""
    op = f"{op}(layer {layer})"
    _want_named(op, "activation", activation, Kind.ACTIVATION, layer)
    sums = slices_of(op, layer, owner_of(layer, layers, activation.grid), weight, activation)
    _want_activation(op, layer, activation, sums, kinds)
    return Spec(Kind.ACTIVATION, layer + 1, activation.holds, sums, activation.step, activation.grid)


def backward(
    layer: int, activation: Spec, gradient: Spec, weight: Spec, *, layers: int, kinds: Kinds = ()
) -> tuple[Spec, Spec]:
    """The gradient of these slices' parameters, and their terms of the input's gradient (of a ROW: their slices)."""
    op = f"backward(layer {layer})"
    _want_named(op, "activation", activation, Kind.ACTIVATION, layer)
    sums = slices_of(op, layer, owner_of(layer, layers, activation.grid), weight, activation)
    _want_activation(op, layer, activation, sums, kinds)
    _want_gradient(op, layer, activation, gradient, _of_output(layer, layers, gradient, sums, kinds))
    step, grid = activation.step, activation.grid
    return (
        _grad_weight(layer, layers, weight.holds, activation),
        Spec(Kind.GRAD_ACTIVATION, layer, activation.holds, sums, step, grid),
    )


def backward_weight(layer: int, layers: int, activation: Spec, gradient: Spec, slices: int, kinds: Kinds = ()) -> Spec:
    """The half of a backward pass that needs no weight, of a norm or of some slices of a body (0: all)."""
    op = f"backward_weight(layer {layer})"
    _want_named(op, "activation", activation, Kind.ACTIVATION, layer)
    _want_slices(op, activation, slices if _kind(layer, kinds) is LayerKind.ROW else 0)
    _want_gradient(op, layer, activation, gradient, _of_output(layer, layers, gradient, slices, kinds))
    return _grad_weight(layer, layers, held_by(slices, activation.grid), activation)


def _kind(layer: int, kinds: Kinds) -> LayerKind:
    return kinds[layer] if kinds else LayerKind.SLICED


def _want_activation(op: str, layer: int, activation: Spec, slices: int, kinds: Kinds) -> None:
    """A complete input, or of a ROW the slices of it that the weight has; whole sequences where tokens are mixed."""
    kind = _kind(layer, kinds)
    if kind is LayerKind.ROW and slices and not side_by_side(Kind.ACTIVATION, layer, len(kinds), kinds):
        raise Refused(
            f"{op}: a row layer takes slices of its input side by side, but layer {layer - 1} is "
            f"{kinds[layer - 1].value} and makes none; put a column or a projection before it, or gather its weight."
        )
    _want_slices(op, activation, slices if kind is LayerKind.ROW else 0)
    if kind is LayerKind.SLICED and not activation.whole_sequences:
        raise Refused(f"{op}: {activation} was given; this layer wants whole sequences. Gather their slices first.")


def _want_slices(op: str, activation: Spec, slices: int) -> None:
    """An activation with some slices of the layer's in it (0: all)."""
    if activation.sums != slices:
        _want_complete(op, "activation", activation, slices)
        raise Refused(
            f"{op}: the activation given is {activation}; a row layer's slices take their own slices of it and no "
            "others: give what this rank has of the layer before, ungathered."
        )


def _of_output(layer: int, layers: int, gradient: Spec, slices: int, kinds: Kinds) -> int:
    """Which slices of its output's gradient a layer wants (0: all); a COLUMN uses its own of all, or of what a ROW
    after it has made."""
    kind = _kind(layer, kinds)
    if kind is LayerKind.COLUMN:
        return slices if gradient.sums and side_by_side(Kind.GRAD_ACTIVATION, layer + 1, layers, kinds) else 0
    return slices if layer == layers - 1 and kind is not LayerKind.ROW else 0


def held_by(slices: int, grid: Grid) -> Holds:
    """What some slices of a layer are of its parameters (0: all)."""
    return Holds(slices, grid.width).simplified() if slices else WHOLE


def _grad_weight(layer: int, layers: int, holds: Holds, activation: Spec) -> Spec:
    """The gradient of a layer's parameters; of a tied head the embedding's, from these pieces as the head."""
    owner, mask = owner_of(layer, layers, activation.grid), activation.holds.mask
    sums = mask if owner == layer else mask << activation.grid.tied
    return Spec(Kind.GRAD_WEIGHT, owner, holds, sums, activation.step, activation.grid)


_FIRST = {"norm": 1, "dense": 0}
"""The first layer of those that carry the residual."""


def norm_forward(
    layer: int, after: int, branch: Spec, weight: Spec, residual: Spec | None = None, *, what: str = "norm"
) -> tuple[Spec, Spec | None]:
    """(residual, branch) to (normalised, the residual that the next norm reads); both sums must be complete.

    `after` is the number of the next norm (-1: there is none). `what` is "norm", or "dense" for the layers between
    experts, which carry the residual in the same way.
    """
    op = f"forward_{what}(layer {layer})"
    first = _FIRST[what]
    _want_input(op, "branch", branch, Kind.ACTIVATION, layer)
    if (residual is None) != (layer == first):
        must = f"the first {what} layer is given no residual" if layer == first else "a residual is missing"
        raise Refused(f"{op}: {must}; every {what} layer but the first adds its branch to residuals[{layer}].")
    if residual is not None:
        _want_input(op, "residual", residual, Kind.RESIDUAL, layer)
        _want_same(op, "residual", residual, "branch", branch)
    want_weight(op, layer, weight, branch.step)
    holds, step, grid = branch.holds, branch.step, branch.grid
    handed_on = None if after < 0 else Spec(Kind.RESIDUAL, after, holds, 0, step, grid)
    return Spec(Kind.ACTIVATION, layer + 1, holds, 0, step, grid), handed_on


def norm_backward(
    layer: int,
    after: int,
    branch: Spec,
    gradient: Spec,
    weight: Spec,
    grad_residual: Spec | None = None,
    *,
    what: str = "norm",
) -> tuple[Spec, ...]:
    """The gradients of the norm's parameters, of its branch, and of the residual that it was given, if any.

    `after` and `what` as for `norm_forward`.
    """
    op = f"backward_{what}(layer {layer})"
    first = _FIRST[what]
    _want_input(op, "branch", branch, Kind.ACTIVATION, layer)
    _want_gradient(op, layer, branch, gradient, 0)
    if (grad_residual is None) != (after < 0):
        must = f"the last {what} layer hands on no residual" if after < 0 else "the residual's gradient is missing"
        raise Refused(f"{op}: {must}; every {what} layer but the last is given the next one's grad_residuals as well.")
    if grad_residual is not None:
        _want_input(op, "residual's gradient", grad_residual, Kind.GRAD_RESIDUAL, after)
        _want_same(op, "residual's gradient", grad_residual, "branch", branch)
    want_weight(op, layer, weight, branch.step)
    holds, step, grid = branch.holds, branch.step, branch.grid
    own = Spec(Kind.GRAD_WEIGHT, layer, weight.holds, holds.mask, step, grid)
    made = Spec(Kind.GRAD_ACTIVATION, layer, holds, 0, step, grid)
    return (own, made) if layer == first else (own, made, Spec(Kind.GRAD_RESIDUAL, layer, holds, 0, step, grid))


def loss_stats(layers: int, logits: Spec) -> Spec:
    """What the loss needs of some slices of the logits: three numbers a token."""
    if logits.kind is not Kind.ACTIVATION or logits.layer != layers or not logits.sums:
        raise Refused(f"loss_stats: {logits} was given; give slices of the logits, activations[{layers}].")
    return logits._replace(kind=Kind.STATS)


def loss(layers: int, logits: Spec, stats: Spec | None) -> Spec:
    """Slices of the logits, with the numbers of all slices, make these slices of their gradient."""
    if logits.kind is not Kind.ACTIVATION or logits.layer != layers:
        raise Refused(f"loss: the activation given is {logits}; the loss reads the last one, activations[{layers}].")
    if (stats is None) != (logits.sums == 0):
        what = f"{logits} was given without stats" if stats is None else f"{logits} needs no stats"
        raise Refused(f"loss: {what}; slices of the logits take the gathered loss_stats of all slices, and no others.")
    if stats is not None:
        want_kind("loss", "stats", stats, Kind.STATS)
        _want_same("loss", "stats", stats, "logits", logits)
        _want_complete("loss", "stats", stats)
    return logits._replace(kind=Kind.GRAD_ACTIVATION)


def slices_of(op: str, layer: int, owner: int, weight: Spec, activation: Spec) -> int:
    """The slices that a weight of layer `owner` is, with which a layer computes, as a bit set; 0 for all."""
    of = activation.grid.width
    if weight.kind is Kind.WEIGHT and weight.layer == owner and weight.step == activation.step:
        if weight.holds.complete:
            return 0
        if of % weight.holds.of == 0:
            return weight.holds.refined(of).mask
        sliced = Holds(weight.holds.mask, weight.holds.of).simplified()
        if of % sliced.of == 0:
            return sliced.refined(of).mask
        if of > 1:
            raise Refused(
                f"{op}: the weight given is {weight}, which is not made of whole slices of {of}; gather a slice first."
            )
    want_weight(op, layer, weight, activation.step, owner)
    return 0


def _want_input(op: str, what: str, got: Spec, kind: Kind, layer: int) -> None:
    if got.kind is not kind or got.layer != layer or got.sums:
        _want_named(op, what, got, kind, layer)
        _want_complete(op, what, got)


def _want_named(op: str, what: str, got: Spec, kind: Kind, layer: int) -> None:
    if got.kind is not kind:
        want_kind(op, what, got, kind)
    if got.layer != layer:
        raise Refused(f"{op}: the {what} given is {got}; this op reads {kind.value}[{layer}].")


def _want_complete(op: str, what: str, got: Spec, slices: int = 0) -> None:
    if got.sums >> got.grid.width:
        raise Refused(
            f"{op}: the {what} given is {got}; the queries have not met every block of keys and values up to their own."
        )
    if got.sums and not slices:
        missing = listed(i for i in range(got.grid.width) if not got.sums >> i & 1)
        raise Refused(
            f"{op}: the {what} given is {got}; slices {missing} are missing. Put all together first: reduce a body's "
            "terms over the ranks that have them, gather slices that lie side by side, or exchange experts' buffers by "
            "all_to_all."
        )


def _want_gradient(op: str, layer: int, activation: Spec, gradient: Spec, sums: int) -> None:
    want_kind(op, "gradient", gradient, Kind.GRAD_ACTIVATION)
    if gradient.layer != layer + 1:
        raise Refused(f"{op}: the gradient given is {gradient}; this op reads grad_activations[{layer + 1}].")
    if gradient.sums != sums:
        _want_complete(op, "gradient", gradient, sums)
        raise Refused(f"{op}: the gradient given is {gradient}; give the slices that the weight has.")
    _want_same(op, "gradient", gradient, "activation", activation)


def _want_same(op: str, what: str, one: Spec, other_what: str, other: Spec) -> None:
    if one.holds != other.holds or one.step != other.step:
        raise Refused(
            f"{op}: the {what} is {one} and the {other_what} {other}; both must be of the same tokens and step."
        )
