"""Rules of compute on a tape, one function for each op: inputs must be live here and now, outputs must be new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardlab.check.rank_state import RankState
from shardlab.program import Holds, Kind, Op, OpKind, Spec
from shardlab.program.rooted import Names
from shardlab.program.tape import LOAD_FIRST, NO_WEIGHT
from shardlab.rules import dealing, gathers, sums
from shardlab.rules import update as steps
from shardlab.rules.layer import BackwardResult
from shardlab.rules.pieces import MOST_SLICES, counted
from shardlab.rules.place import want_place
from shardlab.rules.spec import Form, form_of

Rule = Callable[[RankState, Op], None]

NONE: dict[Form, int] = {}
"""Values that layers keep, by form, of an activation of which they keep none."""


def forward(state: RankState, op: Op) -> None:
    live, inputs, outputs = state.live, op[2], op[3]
    activation, weight = inputs[0], inputs[1]
    given = [live[activation]]
    if len(inputs) > 2:
        given += [live[number] for number in inputs[2:]]
    made, saved = state.layer(op).forward(given, live[weight], "forward", op[7])
    count = len(made)
    state.make_all(outputs[:count], made)
    if len(outputs) == count + 1:
        _save(state, outputs[count], activation, saved)
    elif len(outputs) > count:
        given = f"has {counted(len(outputs), 'output')}, but this layer makes {counted(count, 'value')}"
        state.refuse("malformed tape", given, "number these, and what is saved")


def recompute(state: RankState, op: Op) -> None:
    (activation, weight), (saved,) = op[2], op[3]
    rules, spec = state.layer(op), state.live[activation]
    if not rules.layer.recomputed:
        given = f"this {rules.layer.name} layer takes or makes several values, and is not recomputed"
        state.refuse("no forward", given, "save what its forward makes")
    _save(state, saved, activation, rules.forward([spec], state.live[weight], "recompute")[1])


def _save(state: RankState, number: int, activation: int, spec: Spec) -> None:
    """Autograd's part: owned by the activation, it goes with that, with its backward, or for a newer one like it."""
    state.note(number, spec)
    state.saved_of.setdefault(activation, {})[spec[0]] = number


def backward(state: RankState, op: Op) -> None:
    state.make_all(op[3], _backward(state, op)[0])


def backward_input(state: RankState, op: Op) -> None:
    *outputs, half = op[3]
    activation = op[2][0]
    made, follows = _backward(state, op)
    state.make_all(outputs, made[1:])
    state.note(half, Spec(follows.half, state.live[activation].cells))
    state.half_of.setdefault(activation, {})[follows.half] = half


def _backward(state: RankState, op: Op) -> tuple[list[Spec], BackwardResult]:
    """Derive what both halves of a backward pass make, whichever the op keeps, and what it follows from."""
    live, inputs = state.live, op[2]
    activation, gradient, weight, saved = inputs[0], inputs[1], inputs[2], inputs[3]
    gradients = [live[gradient]]
    if len(inputs) > 4:
        gradients += [live[number] for number in inputs[4:]]
    made, follows = state.layer(op).backward(live[activation], gradients, live[weight])
    known = state.saved_of.get(activation, NONE)
    if known.pop(follows.saved, None) != saved:
        if saved in known.values():
            given = "the forward pass was by other slices of the layer than the weight and the gradient"
            state.refuse("other forward", given, "give the slices of the forward pass")
        given = f"value {saved} is not what the layer kept of this activation's forward"
        state.refuse("no forward", given, "read what that saved, once")
    return made, follows


def backward_weight(state: RankState, op: Op) -> None:
    (activation, gradient, half), (grad_weight,) = op[2], op[3]
    spec, given = state.live[activation], state.live[gradient]
    if half not in state.specs or state.half_of.get(activation, NONE).pop(state.specs[half][0], None) != half:
        given = f"value {half} is not what the first half of this activation's backward left for it"
        state.refuse("no forward", given, "read what that left, once")
    state.make(grad_weight, state.layer(op).backward_weight(spec, [given], state.specs[half]))


def add(state: RankState, op: Op) -> None:
    (a, b), (total,) = op[2], op[3]
    made = sums.add_two(state.live[a], state.live[b])
    state.want_layer(op, made[0].layer)
    state.make(total, made)


def direction(state: RankState, op: Op) -> None:
    read = [state.live[number] for number in op[2]]
    made = state.rules.direction(op[1], read, state.trained)
    _want_norms_alike(state, op, *read[2:])
    state.make(op[3][0], made)


def update(state: RankState, op: Op) -> None:
    new_weight, new_state = op[3]
    live = state.live
    read = [live[number] for number in op[2]]
    made = state.rules.update(op[1], read, state.trained)
    _want_norms_alike(state, op, steps.norm_and_direction(read[3:])[0])
    for number in (op[2][place] for place in OpKind.UPDATE.row.ends):
        if state.reading.get(number):
            state.refuse("in flight", f"{live[number]} is still read by a communication in flight", "wait for it first")
        del live[number]
    state.make(new_weight, made[0])
    state.make(new_state, made[1])


def _want_norms_alike(state: RankState, op: Op, norm: Spec | None = None) -> None:
    """Want a norm of what is trained alone, and one for each update of this rank or for none."""
    if norm is not None:
        steps.want_no_frozen(op.about, norm, Holds(state.trained, state.program.layers))
    if state.clips is not None and state.clips != (norm is not None):
        given = "some updates of this rank are given the gradient's norm and some are not"
        state.refuse("norm for some", given, "give it to all")
    state.clips = norm is not None


def _computed(rule: Callable[..., Spec | Sequence[Spec]], state: RankState, op: Op) -> None:
    """An op whose rule takes its layer and all that it reads."""
    made = rule(op[1], *[state.live[number] for number in op[2]])
    state.make_all(op[3], (made,) if isinstance(made, Spec) else made)


def _of_logits(rule: Callable[..., Spec], state: RankState, op: Op) -> None:
    state.want_layer(op, state.program.layers)
    _computed(rule, state, op)


def loss(state: RankState, op: Op) -> None:
    if op[3]:
        _of_logits(steps.loss, state, op)
        return
    if state.trained:
        state.refuse("malformed tape", "makes no gradient, but the program trains", "number the gradient")
    state.want_layer(op, state.program.layers)
    steps.loss(op[1], *[state.live[number] for number in op[2]])


def attend(state: RankState, op: Op) -> None:
    _computed(state.rules.attend, state, op)


def attend_backward(state: RankState, op: Op) -> None:
    _computed(state.rules.attend_backward, state, op)


def norm(state: RankState, op: Op) -> None:
    _computed(partial(steps.norm, state.program.layers), state, op)


def slice_(state: RankState, op: Op) -> None:
    holds, spec = op.holds, state.live[op[2][0]]
    if holds is None or holds.mask.bit_count() != 1 or holds.mask < 0:
        state.refuse(
            "unknown slice", f"{_holds_text(holds)} is not one of the equal parts of a value", "name one of them"
        )
    state.want_layer(op, spec.layer)
    state.make(op[3][0], dealing.slice_of(spec, holds.mask.bit_length() - 1, holds.of))


def concatenate(state: RankState, op: Op) -> None:
    specs = [state.live[number] for number in op[2]]
    state.want_layer(op, specs[0].layer)
    state.make(op[3][0], gathers.gather(specs[0].about("concatenate"), specs, Names(range(len(specs)), "piece")))


def load_batch(state: RankState, op: Op) -> None:
    holds, (), (activation,) = op.holds, op[2], op[3]
    space = state.rules.space
    microbatches, cells = space.microbatches, space.cells
    if holds is None or holds.of not in (microbatches, cells) or not 0 < holds.mask < 1 << holds.of:
        given = f"{_holds_text(holds)} is not a set of the step's {microbatches} microbatches"
        state.refuse("unknown microbatch", given, "name some of them")
    state.want_layer(op, 0)
    state.make(activation, Spec(form_of(Kind.ACTIVATION, 0, 0, space), holds.refined(cells).mask))


def _slice_of_weights(state: RankState, op: Op) -> Holds:
    """The slices of a layer's own weights that an op makes a value of."""
    holds, layer = op.holds, op[1]
    if (
        holds is None
        or not 0 < holds.of <= MOST_SLICES
        or not 0 < holds.mask < 1 << holds.of
        or not 0 <= layer < state.program.layers
    ):
        state.refuse(
            "unknown slice", f"there is no slice {_holds_text(holds)} of layer {layer}", "name slices that it has"
        )
    if state.program.sizes.weight_of(layer) != layer:
        state.refuse("tied weight", NO_WEIGHT, LOAD_FIRST)
    return holds


def scale(state: RankState, op: Op) -> None:
    spec, steps = state.live[op[2][0]], state.rules.space.microbatches
    if op.factor is None or not all(0 < mask < 1 << steps for mask, _ in op.factor.tokens):
        given = f"{op.factor} is not a rational times counts of tokens of the step's microbatches"
        state.refuse("wrong factor", given, "give such a factor")
    state.want_layer(op, spec.layer)
    state.make(op[3][0], sums.scale(spec, op.factor))


def cast(state: RankState, op: Op) -> None:
    spec = state.live[op[2][0]]
    state.want_layer(op, spec.layer)
    state.make(op[3][0], sums.cast(spec, op.dtype))


def zero_gradient(state: RankState, op: Op) -> None:
    holds = _slice_of_weights(state, op)
    state.make(op[3][0], Spec(form_of(Kind.GRAD_WEIGHT, op[1], 0, state.rules.space, holds)))


def _load(kind: Kind, state: RankState, op: Op) -> None:
    holds, layer, (number,) = _slice_of_weights(state, op), op[1], op[3]
    if (kind, layer, holds) in state.loaded:
        given = f"the same slice was loaded by op {state.loaded[kind, layer, holds]} already"
        state.refuse("loaded twice", given, "load each slice once")
    if op.place:
        want_place(op.about, op.place)
    state.loaded[kind, layer, holds] = state.at
    state.make(number, Spec(form_of(kind, layer, 0, state.rules.space, holds, place=op.place)))


def _holds_text(holds: Holds | None) -> str:
    """Get the slices that a tape claims to load; they may be no set at all."""
    return str(holds) if holds is None or holds.mask >= 0 else f"bit set {holds.mask} of {holds.of}"


COMPUTE_RULES: dict[OpKind, Rule] = {
    OpKind.FORWARD: forward,
    OpKind.BACKWARD: backward,
    OpKind.BACKWARD_INPUT: backward_input,
    OpKind.BACKWARD_WEIGHT: backward_weight,
    OpKind.RECOMPUTE: recompute,
    OpKind.ADD: add,
    OpKind.SCALE: scale,
    OpKind.CAST: cast,
    OpKind.ZERO_GRADIENT: zero_gradient,
    OpKind.SLICE: slice_,
    OpKind.CONCATENATE: concatenate,
    OpKind.DIRECTION: direction,
    OpKind.UPDATE: update,
    OpKind.LOSS: loss,
    OpKind.LOSS_STATS: partial(_of_logits, steps.loss_stats),
    OpKind.LOAD_BATCH: load_batch,
    OpKind.LOAD_WEIGHT: partial(_load, Kind.WEIGHT),
    OpKind.LOAD_OPT_STATE: partial(_load, Kind.OPT_STATE),
    OpKind.NORM: norm,
    OpKind.ATTEND: attend,
    OpKind.ATTEND_BACKWARD: attend_backward,
}
