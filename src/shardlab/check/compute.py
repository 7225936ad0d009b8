"""The rules of compute on a tape, one function an op: inputs must be live here and now, outputs must be new."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from shardlab.check.rank_state import RankState
from shardlab.program import Holds, Kind, LayerKind, Op, OpKind, Spec, attention, experts, sliced, transfer
from shardlab.program.sizes import CARRYING

Rule = Callable[[RankState, Op], None]


def free(state: RankState, op: Op) -> None:
    (number,), () = op[2], op[3]
    spec = state.live[number]
    if state.reading.get(number):
        state.refuse(f"free: {spec} is still read by a communication in flight; wait for it first.")
    del state.live[number]
    if spec[0] is Kind.ACTIVATION:
        state.saved_of.pop(number, None)
        state.half_of.pop(number, None)


def forward(state: RankState, op: Op) -> None:
    kind = LayerKind.WHOLE if state.all_whole else state.program.sizes.kind(op[1])
    if kind in CARRYING:
        _forward_carrying(state, op)
        return
    if kind is LayerKind.PROJECT:
        _project(state, op)
        return
    activation, weight = op[2]
    spec = state.live[activation]
    made = _forward(state, kind)(op[1], spec, state.live[weight])
    if len(op[3]) == 1:
        state.make(op[3][0], made)
    else:
        output, saved = op[3]
        state.make(output, made)
        _save(state, saved, activation, transfer.saved(op[1], spec, made.sums))


def _forward(state: RankState, kind: LayerKind) -> Callable[..., Spec]:
    """The rule of a layer with one input and one output."""
    if kind is LayerKind.WHOLE:
        return transfer.forward
    if kind is LayerKind.EXPERTS:
        return experts.forward
    return partial(sliced.forward, layers=state.program.layers, kinds=state.program.sizes.kinds)


def _project(state: RankState, op: Op) -> None:
    activation, weight = op[2]
    spec = state.live[activation]
    made = attention.project(op[1], spec, state.live[weight])
    _make_and_save(state, op, made, transfer.saved(op[1], spec, made[0].parts))


def _make_and_save(state: RankState, op: Op, made: Sequence[Spec], saved: Spec) -> None:
    """All that a layer makes, and what autograd keeps of its first input, if the op says that it does."""
    for number, output in zip(op[3][: len(made)], made, strict=True):
        state.make(number, output)
    if len(op[3]) > len(made):
        (number,) = op[3][len(made) :]
        _save(state, number, op[2][0], saved)


def attend(state: RankState, op: Op) -> None:
    (queries, keys_values), (output,) = op[2], op[3]
    state.make(output, attention.attend(op[1], state.live[queries], state.live[keys_values]))


def attend_backward(state: RankState, op: Op) -> None:
    queries, keys_values, attended, gradient = (state.live[number] for number in op[2])
    made = attention.attend_backward(op[1], queries, keys_values, attended, gradient)
    for number, output in zip(op[3], made, strict=True):
        state.make(number, output)


def _forward_carrying(state: RankState, op: Op) -> None:
    branch, weight, *residual = op[2]
    (read,) = [state.live[number] for number in residual] or [None]
    spec = state.live[branch]
    sizes = state.program.sizes
    made = sliced.norm_forward(
        op[1], sizes.next_carrying(op[1]), spec, state.live[weight], read, what=sizes.kind(op[1]).value
    )
    _make_and_save(state, op, [each for each in made if each is not None], transfer.saved(op[1], spec))


def recompute(state: RankState, op: Op) -> None:
    (activation, weight), (saved,) = op[2], op[3]
    spec = state.live[activation]
    kind = state.program.sizes.kind(op[1])
    if kind in CARRYING:
        state.refuse(f"{op}: a {kind.value} layer is not recomputed.")
    if kind is LayerKind.PROJECT:
        state.refuse(f"{op}: queries, keys and values are not recomputed; making them keeps nothing.")
    made = _forward(state, kind)(op[1], spec, state.live[weight], "recompute")
    _save(state, saved, activation, transfer.saved(op[1], spec, made.sums))


def _save(state: RankState, number: int, activation: int, spec: Spec) -> None:
    """Autograd's part: owned by the activation, it goes with that, with its backward, or for a newer one."""
    state.note(number, spec)
    state.saved_of[activation] = number


def loss(state: RankState, op: Op) -> None:
    (activation, *stats), (gradient,) = op[2], op[3]
    layers = state.program.layers
    state.want_layer(op, layers)
    (read,) = [state.live[number] for number in stats] or [None]
    if state.grid.width > 1 or read is not None:
        made = sliced.loss(layers, state.live[activation], read)
    else:
        made = transfer.loss(layers, state.live[activation])
    state.make(gradient, made)


def loss_stats(state: RankState, op: Op) -> None:
    (logits,), (stats,) = op[2], op[3]
    state.want_layer(op, state.program.layers)
    state.make(stats, sliced.loss_stats(state.program.layers, state.live[logits]))


def backward(state: RankState, op: Op) -> None:
    for number, spec in zip(op[3], _backward(state, op), strict=True):
        state.make(number, spec)


def backward_input(state: RankState, op: Op) -> None:
    *outputs, half = op[3]
    activation, *_ = op[2]
    spec = state.live[activation]
    _, *made = _backward(state, op)
    for number, output in zip(outputs, made, strict=True):
        state.make(number, output)
    state.note(half, transfer.saved(op[1], spec, made[0].sums, Kind.SAVED_FOR_WEIGHT))
    state.half_of[activation] = half


def _backward(state: RankState, op: Op) -> tuple[Spec, ...]:
    """What both halves of a backward pass make, whichever of it the op keeps."""
    activation, gradient, weight, saved, *residual = op[2]
    live, layer = state.live, op[1]
    kind = LayerKind.WHOLE if state.all_whole else state.program.sizes.kind(layer)
    specs = live[activation], live[gradient]
    if kind in CARRYING:
        (read,) = [live[number] for number in residual] or [None]
        after = state.program.sizes.next_carrying(layer)
        made = sliced.norm_backward(layer, after, *specs, live[weight], read, what=kind.value)
    elif kind is LayerKind.PROJECT:
        (grad_keys_values,) = residual
        made = attention.project_backward(layer, *specs, live[grad_keys_values], live[weight])
    elif residual:
        state.refuse(f"{op}: is given {len(op[2])} values; only a norm or a dense layer reads a residual's gradient.")
    elif kind is LayerKind.EXPERTS:
        made = experts.backward(layer, *specs, live[weight])
    elif kind is not LayerKind.WHOLE:
        sizes = state.program.sizes
        made = sliced.backward(layer, *specs, live[weight], layers=sizes.layers, kinds=sizes.kinds)
    else:
        made = transfer.backward(layer, *specs, live[weight])
    if state.saved_of.pop(activation, None) != saved:
        state.refuse(f"{op}: value {saved} is not what autograd saved from this activation's forward.")
    if state.specs[saved].sums != made[1].sums:
        state.refuse(f"{op}: the forward pass was by other slices of the layer than the weight's.")
    return made


def backward_weight(state: RankState, op: Op) -> None:
    (activation, gradient, half), (grad_weight,) = op[2], op[3]
    specs = state.live[activation], state.live[gradient]
    if state.half_of.pop(activation, None) != half:
        state.refuse(f"{op}: value {half} is not what the first half of this activation's backward left for it.")
    kind = state.program.sizes.kind(op[1])
    if kind is LayerKind.WHOLE:
        made = transfer.backward_weight(op[1], *specs)
    elif kind is LayerKind.EXPERTS:
        made = experts.backward_weight(op[1], *specs, state.specs[half].sums)
    elif kind is LayerKind.PROJECT:
        made = attention.project_backward_weight(op[1], *specs, state.specs[half].sums)
    else:
        sizes, slices = state.program.sizes, state.specs[half].sums
        made = sliced.backward_weight(op[1], sizes.layers, *specs, slices, sizes.kinds)
    state.make(grad_weight, made)


def norm(state: RankState, op: Op) -> None:
    (gradient,), (squares,) = op[2], op[3]
    state.make(squares, transfer.norm(op[1], state.program.layers, state.live[gradient], state.cells))


def add(state: RankState, op: Op) -> None:
    (a, b), (total,) = op[2], op[3]
    made = transfer.add(state.live[a], state.live[b])
    state.want_layer(op, made.layer)
    state.make(total, made)


def update(state: RankState, op: Op) -> None:
    gradient, weight, opt_state, *norms = op[2]
    new_weight, new_state = op[3]
    live = state.live
    (norm,) = [live[number] for number in norms] or [None]
    made = transfer.update(op[1], live[gradient], live[weight], live[opt_state], state.cells, norm)
    if state.clips is not None and state.clips != bool(norms):
        state.refuse(f"{op}: some updates of this rank are given the gradient's norm and some are not; give it to all.")
    state.clips = bool(norms)
    for number in (weight, opt_state):
        if state.reading.get(number):
            state.refuse(f"{op}: {live[number]} is still read by a communication in flight; wait for it.")
        del live[number]
    state.make(new_weight, made[0])
    state.make(new_state, made[1])


def load_batch(state: RankState, op: Op) -> None:
    holds, (), (activation,) = op.holds, op[2], op[3]
    microbatches, slices = state.program.microbatches, state.grid.sequence
    if holds is None or holds.of not in (microbatches, microbatches * slices) or not 0 < holds.mask < 1 << holds.of:
        state.refuse(f"{op}: {_said(holds)} is not a set of the step's {microbatches} microbatches.")
    state.want_layer(op, 0)
    pieces = holds.refined(microbatches * slices)
    state.make(activation, Spec(Kind.ACTIVATION, 0, pieces, 0, 0, state.grid))


def load_weight(state: RankState, op: Op) -> None:
    _load(state, op, Kind.WEIGHT)


def load_opt_state(state: RankState, op: Op) -> None:
    _load(state, op, Kind.OPT_STATE)


def _load(state: RankState, op: Op, kind: Kind) -> None:
    holds, layer, (), (number,) = op.holds, op[1], op[2], op[3]
    if holds is None or holds.of < 1 or not 0 < holds.mask < 1 << holds.of or not 0 <= layer < state.program.layers:
        state.refuse(f"{op}: there is no slice {_said(holds)} of layer {layer}.")
    if state.program.sizes.weight_of(layer) != layer:
        state.refuse(f"{op}: {transfer.NO_WEIGHT}")
    if (kind, layer, holds) in state.loaded:
        state.refuse(f"{op}: the same slice was loaded by op {state.loaded[kind, layer, holds]} already.")
    state.loaded[kind, layer, holds] = state.at
    state.make(number, Spec(kind, layer, holds))


def _said(holds: Holds | None) -> str:
    """What a tape claims to load; it may be no set at all."""
    return str(holds) if holds is None or holds.mask >= 0 else f"bit set {holds.mask} of {holds.of}"


COMPUTE_RULES: dict[OpKind, Rule] = {
    OpKind.FREE: free,
    OpKind.FORWARD: forward,
    OpKind.BACKWARD: backward,
    OpKind.BACKWARD_INPUT: backward_input,
    OpKind.BACKWARD_WEIGHT: backward_weight,
    OpKind.RECOMPUTE: recompute,
    OpKind.ADD: add,
    OpKind.UPDATE: update,
    OpKind.LOSS: loss,
    OpKind.LOSS_STATS: loss_stats,
    OpKind.LOAD_BATCH: load_batch,
    OpKind.LOAD_WEIGHT: load_weight,
    OpKind.LOAD_OPT_STATE: load_opt_state,
    OpKind.NORM: norm,
    OpKind.ATTEND: attend,
    OpKind.ATTEND_BACKWARD: attend_backward,
}
