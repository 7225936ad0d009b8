"""The rules: what each op makes of the specs it is given, or why it is refused.

Pure functions from specs to specs. Tracing calls them at the line that issues the op, and the checks call the
same ones when they derive every spec again from the tapes alone. Every refusal begins with the op's name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from shardlab.program import attention, experts
from shardlab.program.errors import Refused
from shardlab.program.sizes import HEADS, LayerKind, side_by_side
from shardlab.program.tape import Message, OpKind
from shardlab.program.uniting import gathered, unite_holds, unite_scalars, unite_slices, unite_sums
from shardlab.program.values import (
    ROW_KINDS,
    WHOLE,
    Grid,
    Holds,
    Kind,
    Spec,
    listed,
    microbatches_text,
    pieces_text,
)
from shardlab.program.wants import want_kind, want_weight

_GATHERS = frozenset({OpKind.ALL_GATHER, OpKind.GATHER})
_ACTIVATION, _GRAD_ACTIVATION = Kind.ACTIVATION, Kind.GRAD_ACTIVATION
_WEIGHT, _OPT_STATE, _GRAD_WEIGHT, _SCALAR = Kind.WEIGHT, Kind.OPT_STATE, Kind.GRAD_WEIGHT, Kind.SCALAR

NO_WEIGHT = "the head is tied to the embedding and has no weight of its own; it computes with weights[0], load layer 0."
"""Why nothing is loaded for the last layer of a tied model."""


def forward(layer: int, activation: Spec, weight: Spec, op: str = "forward") -> Spec:
    """Activation l and the complete weight of layer l make activation l + 1."""
    if activation.kind is not _ACTIVATION or activation.layer != layer:
        op = f"{op}(layer {layer})"
        want_kind(op, "activation", activation, _ACTIVATION)
        raise Refused(f"{op}: the activation given is {activation}; layer {layer} reads activations[{layer}].")
    if (
        weight.kind is not _WEIGHT
        or weight.layer != layer
        or weight.step != activation.step
        or not weight.holds.complete
    ):
        want_weight(f"{op}(layer {layer})", layer, weight, activation.step)
    return Spec(_ACTIVATION, layer + 1, activation.holds, 0, activation.step)


def saved(layer: int, activation: Spec, slices: int = 0, kind: Kind = Kind.SAVED) -> Spec:
    """What autograd keeps between a layer's forward and backward, or between the halves of its backward.

    `slices` are those of the parameters that the layer computed with, as a bit set (0: all).
    """
    return Spec(kind, layer, activation.holds, slices, activation.step, activation.grid)


def loss(layers: int, activation: Spec) -> Spec:
    """The last activation makes its own gradient."""
    if activation.kind is not _ACTIVATION or activation.layer != layers:
        want_kind("loss", "activation", activation, _ACTIVATION)
        raise Refused(
            f"loss: the activation given is {activation}; the loss reads the last one, activations[{layers}]."
        )
    return Spec(_GRAD_ACTIVATION, layers, activation.holds, 0, activation.step, activation.grid)


def backward(layer: int, activation: Spec, gradient: Spec, weight: Spec) -> tuple[Spec, Spec]:
    """Activation l, the gradient of activation l + 1 and the weight make the weight's gradient and activation l's."""
    if (
        activation.kind is not _ACTIVATION
        or gradient.kind is not _GRAD_ACTIVATION
        or activation.layer != layer
        or gradient.layer != layer + 1
        or activation.holds != gradient.holds
        or activation.step != gradient.step
    ):
        _refuse_backward(layer, activation, gradient)
    if (
        weight.kind is not _WEIGHT
        or weight.layer != layer
        or weight.step != activation.step
        or not weight.holds.complete
    ):
        want_weight(f"backward(layer {layer})", layer, weight, activation.step)
    holds, step = activation.holds, activation.step
    return (
        Spec(_GRAD_WEIGHT, layer, WHOLE, holds.mask, step),
        Spec(_GRAD_ACTIVATION, layer, holds, 0, step),
    )


def backward_weight(layer: int, activation: Spec, gradient: Spec) -> Spec:
    """The half of `backward` that needs no weight: the weight's gradient."""
    if not (
        activation.kind is _ACTIVATION
        and gradient.kind is _GRAD_ACTIVATION
        and activation.layer == layer
        and gradient.layer == layer + 1
        and activation.holds == gradient.holds
        and activation.step == gradient.step
    ):
        _refuse_backward(layer, activation, gradient, "backward_weight")
    return Spec(_GRAD_WEIGHT, layer, WHOLE, activation.holds.mask, activation.step)


def _refuse_backward(layer: int, activation: Spec, gradient: Spec, op: str = "backward") -> None:
    op = f"{op}(layer {layer})"
    want_kind(op, "activation", activation, _ACTIVATION)
    want_kind(op, "gradient", gradient, _GRAD_ACTIVATION)
    if activation.layer != layer:
        raise Refused(
            f"{op}: the activation given is {activation}; layer {layer} was fed activations[{layer}], give that."
        )
    if gradient.layer != layer + 1:
        raise Refused(
            f"{op}: the gradient given is {gradient}; layer {layer} turns grad_activations[{layer + 1}] into "
            f"grad_activations[{layer}]."
        )
    raise Refused(
        f"{op}: the activation is of {microbatches_text(activation.holds.mask)} and the gradient of "
        f"{microbatches_text(gradient.holds.mask)}; both must be of the same microbatches and step."
    )


def add(a: Spec, b: Spec) -> Spec:
    """Two weight gradients of one layer and slice, of different microbatches, make their sum; so do two scalars, and
    what queries have met of two lots of keys and values."""
    if (
        a.kind is _GRAD_WEIGHT
        and b.kind is _GRAD_WEIGHT
        and a.layer == b.layer
        and a.holds == b.holds
        and not a.sums & b.sums
        and a.step == b.step
    ):
        return Spec(_GRAD_WEIGHT, a.layer, a.holds, a.sums | b.sums, a.step, a.grid)
    return _unite("add", [a, b], ["the first value", "the second value"])


def uses(layer: int, cells: int, grid: Grid) -> int:
    """What a finished gradient has summed: every piece of the batch, of a tied weight once for each of its two uses."""
    return cells | cells << grid.tied if grid.tied and layer == 0 else cells


def norm(layer: int, layers: int, gradient: Spec, cells: int) -> Spec:
    """The squares of a finished gradient's elements, summed: their part of the model's squared gradient norm.

    A tied weight is a parameter of two layers; its squares stand for both.
    """
    cells = uses(layer, cells, gradient.grid)
    if gradient.kind is not _GRAD_WEIGHT or gradient.layer != layer or gradient.sums != cells:
        op = f"norm(layer {layer})"
        want_kind(op, "gradient", gradient, _GRAD_WEIGHT)
        if gradient.layer != layer:
            raise Refused(f"{op}: {gradient} was given; give a gradient of layer {layer}.")
        raise Refused(
            f"{op}: {pieces_text(cells & ~gradient.sums, gradient.grid)} missing from {gradient}; squares do "
            "not add up over microbatches. Add or reduce the missing gradients first."
        )
    mask, of = gradient.holds
    counted = mask << layer * of
    if gradient.grid.tied and layer == 0:
        counted |= mask << (layers - 1) * of
    return Spec(_SCALAR, 0, Holds(counted, layers * of), 0, gradient.step)


def scale(op: str, norm: Spec, step: int) -> None:
    """Refuse what is not the whole model's gradient norm of this step."""
    want_kind(op, "norm", norm, _SCALAR)
    if not norm.holds.complete:
        missing = listed(i for i in range(norm.holds.of) if not norm.holds.mask >> i & 1)
        raise Refused(
            f"{op}: the norm given lacks parts {missing} of {norm.holds.of} of the model's parameters; add and "
            "all_reduce the squares of every slice of every layer, each once."
        )
    if norm.sums:
        raise Refused(f"{op}: the norm given is {norm}; only the sum of all squares is the gradient's norm.")
    if norm.step != step:
        raise Refused(f"{op}: the norm given is of step {norm.step}, the gradient of step {step}.")


def update(
    layer: int, gradient: Spec, weight: Spec, opt_state: Spec, cells: int, norm: Spec | None = None
) -> tuple[Spec, Spec]:
    """A gradient with every microbatch in it moves an optimizer state and that slice of the weight one step on.

    Weight and gradient may hold more than the state; the new weight is the state's slice alone. `cells` is the bit set
    of all microbatches of the step.
    """
    cells = uses(layer, cells, gradient.grid)
    if norm is not None:
        scale(f"update(layer {layer})", norm, gradient.step)
    if not (
        gradient.kind is _GRAD_WEIGHT
        and weight.kind is _WEIGHT
        and opt_state.kind is _OPT_STATE
        and gradient.layer == weight.layer == opt_state.layer == layer
        and gradient.step == weight.step == opt_state.step
        and gradient.sums == cells
        and (weight.holds == opt_state.holds or weight.holds.complete)
        and (gradient.holds == opt_state.holds or gradient.holds.complete)
    ):
        _refuse_update(layer, gradient, weight, opt_state, cells)
    step = weight.step + 1
    return Spec(_WEIGHT, layer, opt_state.holds, 0, step), Spec(_OPT_STATE, layer, opt_state.holds, 0, step)


def _refuse_update(layer: int, gradient: Spec, weight: Spec, opt_state: Spec, cells: int) -> None:
    op = f"update(layer {layer})"
    want_kind(op, "gradient", gradient, _GRAD_WEIGHT)
    want_kind(op, "weight", weight, _WEIGHT)
    want_kind(op, "optimizer state", opt_state, _OPT_STATE)
    for value in (gradient, weight, opt_state):
        if value.layer != layer:
            raise Refused(f"{op}: {value} was given; layer {layer} is updated from its own gradient, weight and state.")
    if weight.step != opt_state.step or weight.step != gradient.step:
        raise Refused(
            f"{op}: the weight is of step {weight.step}, the optimizer state of step {opt_state.step} and the gradient "
            f"of step {gradient.step}; all three must be of one step: each slice is updated exactly once a step."
        )
    if gradient.sums != cells:
        missing = cells & ~gradient.sums
        verb = "are" if missing.bit_count() > 1 else "is"
        raise Refused(
            f"{op}: {pieces_text(missing, gradient.grid)} {verb} missing from {gradient}; an update wants "
            "every microbatch exactly once. Add or reduce the missing gradients first."
        )
    for what, value in (("gradient", gradient), ("weight", weight)):
        if not value.holds.contains(opt_state.holds):
            raise Refused(
                f"{op}: the {what} holds slices {value.holds}, but the optimizer state holds {opt_state.holds}; the "
                f"{what} must contain every slice that is updated."
            )


def _unite(verb: str, specs: Sequence[Spec], names: Sequence[str]) -> Spec:
    """The sum of values: weight gradients, scalars, or what attention has done in part."""
    first = specs[0]
    if attention.in_parts(first):
        return attention.unite(f"{verb}({first.kind.value}[{first.layer}])", specs, names)
    if first.kind is _SCALAR:
        return unite_scalars(f"{verb}(scalars)", specs, names)
    return unite_sums(f"{verb}({first.kind.value}[{first.layer}])", specs, names)


def collective(
    kind: OpKind, specs: Sequence[Spec], ranks: Sequence[int], layers: int, kinds: Sequence[LayerKind] = ()
) -> list[Spec]:
    """What each member of the group receives, in group order; `kinds` are the layers' (none: all WHOLE).

    Of a GATHER or a REDUCE it is what the root receives; `shardlab.program.rooted` gives it to the root alone.
    """
    if kind is OpKind.ALL_TO_ALL:
        return experts.all_to_all(specs, ranks, kinds)
    united = unite(kind, specs, ranks, layers, kinds)
    return list(shares(kind, united, len(specs))) if kind is OpKind.REDUCE_SCATTER else [united] * len(specs)


def unite(
    kind: OpKind, specs: Sequence[Spec], ranks: Sequence[int], layers: int, kinds: Sequence[LayerKind] = ()
) -> Spec:
    """What all members of the group make together, before a REDUCE_SCATTER deals it out."""
    united = _united(kind, specs)
    if united is not None:
        return united
    # something overlaps or does not belong together: the slow rules say what
    names = [f"rank {rank}" for rank in ranks]
    first = specs[0]
    name = f"{kind.value}({first.kind.value}[{first.layer}])"
    if first.kind is _SCALAR and kind not in (OpKind.ALL_REDUCE, OpKind.REDUCE):
        raise Refused(f"{kind.value}(scalars): a scalar has no slices; all_reduce it.")
    if LayerKind.EXPERTS in kinds and kind not in _GATHERS and first.kind in experts.BUFFERS:
        experts.refuse_sum(name, first)
    if kind not in _GATHERS and first.kind is _ACTIVATION and attention.met(first):
        raise Refused(
            f"{name}: {first} is no term of a sum, since each rank has its own queries; add what one rank's "
            "queries have met."
        )
    if _by_slices(kind, specs):
        _want_sort(name, kind, first, layers, kinds)
        return unite_slices(name, specs, names, gathers=kind in _GATHERS)
    if kind in _GATHERS:
        return unite_holds(name, specs, names)
    return _unite(kind.value, specs, names)


def shares(kind: OpKind, united: Spec, members: int) -> Iterator[Spec]:
    """What each of so many members receives of a sum that is scattered."""
    parts: Iterable[Holds]
    if united.kind in ROW_KINDS:
        cut = attention.balanced_parts if united.kind is Kind.GRAD_KEYS_VALUES else Holds.split_sequences
        parts = cut(united.holds, members, united.grid.sequence)
        if not parts:
            raise Refused(
                f"{kind.value}({united}): sequences of {united.grid.sequence} slices do not divide among "
                f"{members} ranks; scatter over an axis whose ranks divide them."
            )
    else:
        parts = united.holds.split(members)
    return (united._replace(holds=holds) for holds in parts)


def _by_slices(kind: OpKind, specs: Sequence[Spec]) -> bool:
    """Whether what is put together is told by *sums*: slices that lie side by side, or terms."""
    first = specs[0]
    if kind not in _GATHERS:
        return first.kind in (_ACTIVATION, _GRAD_ACTIVATION) and first.grid.width > 1
    if first.kind is Kind.STATS:
        return True
    if first.kind not in ROW_KINDS:
        return False
    apart = any(spec.parts != first.parts for spec in specs)
    return apart or (first.parts > 0 and all(spec.holds == first.holds for spec in specs))


def _want_sort(op: str, kind: OpKind, first: Spec, layers: int, kinds: Sequence[LayerKind]) -> None:
    """Refuse to gather terms of a sum, and to sum what lies side by side."""
    beside = side_by_side(first.kind, first.layer, layers, kinds)
    if kind in _GATHERS:
        between = first.layer - (first.kind in (_ACTIVATION, _GRAD_ACTIVATION))  # whose queries were mixed into it
        if first.kind in HEADS or (0 <= between < len(kinds) and kinds[between] is LayerKind.PROJECT):
            raise Refused(
                f"{op}: {first} was given; attention's heads stay where they are: each rank's mix its own keys and "
                "values, and the layer after takes them as they are."
            )
        if not beside:
            raise Refused(
                f"{op}: {first} was given, which is one term of a sum and no slice of the whole. Reduce before "
                "gathering (all_reduce, or reduce_scatter along the sequence)."
            )
    elif beside and first.layer == layers:
        raise Refused(
            f"{op}: slices of the logits are no terms of a sum; the loss takes them with their loss_stats, or "
            "all_gather them."
        )
    elif beside and first.sums:
        raise Refused(
            f"{op}: {first} was given, a slice of the whole and no term of a sum; slices lie side by side. all_gather "
            "them, or leave them where they are if the next layer takes slices."
        )


def _united(kind: OpKind, specs: Sequence[Spec]) -> Spec | None:
    """What `unite_holds` or `unite_sums` makes of pieces that are alike but for the set that is united, else None."""
    what, layer, (mask, of), sums, step, _ = specs[0]
    gathers = kind in _GATHERS
    if what is _SCALAR or ((what is Kind.STATS) if gathers else (what is not _GRAD_WEIGHT)):
        return None
    for spec in specs[1:]:
        other, other_layer, (other_mask, other_of), other_sums, other_step, _ = spec
        if other is not what or other_layer != layer or other_of != of or other_step != step:
            return None
        if gathers:
            if other_mask & mask or other_sums != sums:
                return None
            mask |= other_mask
        else:
            if other_sums & sums or other_mask != mask:
                return None
            sums |= other_sums
    holds = gathered(what, Holds(mask, of)) if gathers else specs[0].holds
    return Spec(what, layer, holds, sums, step, specs[0].grid)


def message_of(spec: Spec) -> Message:
    """The name by which a receive expects a value."""
    return Message(spec.kind, spec.layer, spec.microbatches)


def delivered(source: int, expected: Message, spec: Spec) -> None:
    """Refuse a message that is not the one the receive meant."""
    got = message_of(spec)
    if expected != got:
        raise Refused(
            f"recv from rank {source}: expected {expected}, but the next message on this channel is {got}; messages "
            f"between two ranks arrive in the order they were sent. Make rank {source}'s sends and this rank's "
            "receives agree."
        )
