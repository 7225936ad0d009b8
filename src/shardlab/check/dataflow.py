"""Dataflow: the check derives every spec again from the tapes only, op by op, with the same rules that tracing uses.

A tape may come from tracing, from a tape pass, from a file or from a mutation test, so the check trusts nothing but its
ops. `Dataflow` replays all tapes together. Since sends are buffered here and messages between two ranks arrive in
order, this replay also decides the two lenient channel models, BUFFERED and IN_ORDER. Then `check_rank_ending`,
`check_coverage` and `check_losses` check the end of a step: every loaded slice has moved one step or is frozen, and
nothing else is left. Below them is one function for each compute op (`COMPUTE_RULES`), whose inputs must be live and
whose outputs must be new. The rules of communication are in `communication`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NoReturn

from shardlab.check import in_place, runnable
from shardlab.check.communication import CommunicationCheck, RankState, refuse_second_wait
from shardlab.common.errors import About
from shardlab.common.text import counted
from shardlab.language import Holds, Kind, Op, OpKind, Program, Refused, Spec
from shardlab.language.collective_calls import MemberNames
from shardlab.language.ops import BOOKKEEPING, COMMUNICATION
from shardlab.language.rules import arithmetic, collectives
from shardlab.language.rules import optimizer_step as steps
from shardlab.language.rules.kinds import MOST_SLICES, bits, microbatches_text, numbered
from shardlab.language.rules.layer_rules import BackwardResult
from shardlab.language.rules.refusals import require_place
from shardlab.language.rules.spec import Form, form_of, microbatches_of
from shardlab.language.tape import TIED_HEAD, TIED_HEAD_REMEDY
from shardlab.language.values import deadlock_error


class Dataflow:
    """Replay of all tapes together. The first op that breaks a rule raises Refused.

    Args:
        program: the tapes.
        trains: whether the program must update its weights. Otherwise it must compute the loss of every microbatch and
            must not update any weight.

    Attributes:
        trained: bit set of the layers whose weights are updated.
        states: the ranks; after the replay, with the spec of every value.
        communication: the replay of every communication.
    """

    def __init__(self, program: Program, *, trains: bool = True) -> None:
        ranks = program.mesh.world
        if ranks != program.ranks:
            fault = f"the mesh has {counted(ranks, 'rank')}, but the program has {counted(program.ranks, 'tape')}"
            raise Refused("malformed tape", "", fault, "give one for each rank")
        self.trained = trained = trained_layers(program) if trains else 0
        self._trains = trains
        self.states = [RankState(index, program, trained) for index in range(ranks)]
        self._runnable = deque(self.states)
        self.communication = CommunicationCheck(self.states, self._runnable.append)
        rules: dict[OpKind, Rule] = {**COMPUTE_RULES, **self.communication.rules}
        self._rules = {shape: rules[shape[0]] for shape in SHAPES if shape[0] not in BOOKKEEPING}
        self._rule_of_any = rules

    def run(self) -> None:
        """Replay to the end.

        Raises:
            Deadlock: when no rank can continue although sends are buffered.
            Refused: at the first op that breaks a rule, or for contributions that are missing at the end.
        """
        while self._runnable:
            state = self._runnable.popleft()
            try:
                self._replay(state)
            except Refused as refusal:
                raise refusal.at(state.index, state.at) from None
        blocked = {state.index: self.communication.find_wait(state) for state in self.states if state.waits_for >= 0}
        if blocked:
            raise deadlock_error(blocked)
        self.communication.finish()
        for state in self.states:
            check_rank_ending(state)
        check_coverage(self.states, self.states[0].program.layers)
        if not self._trains:
            check_losses(self.states)

    def release(self) -> None:
        """Drop tapes and specs. They refer to each other, and would otherwise stay until the garbage collector runs."""
        for state in self.states:
            vars(state.live).clear()
        self._rules.clear()
        self._rule_of_any.clear()
        self.communication.rules.clear()

    def _replay(self, state: RankState) -> None:
        """Replay one rank until its tape ends, or until it waits for a communication that is not complete."""
        ops, rules, arrived, live, reading = state.ops, self._rules, state.arrived, state.live, state.reading
        saved_of, half_of, concerned = state.saved_of, state.half_of, state.concerned
        arrive = self.communication.arrive
        for index in range(state.at, len(ops)):
            op = ops[index]
            kind = op[0]
            if kind is FREE:  # half of all ops are FREEs, so their rule is inline
                numbers = op[2]
                if len(numbers) != 1 or op[3]:
                    state.at = index
                    _refuse_shape(state, op)
                number = numbers[0]
                if number in reading or number not in live:
                    state.at = index
                    fault = f"{live[number]} is still read by a communication in flight"
                    state.refuse("in flight", fault, "wait for it first")
                del live[number]
                if number in saved_of:
                    del saved_of[number]
                if number in half_of:
                    del half_of[number]
                continue
            state.at = index
            if kind is not WAIT:
                rule = rules.get((kind, len(op[2]), len(op[3]), op[4] >= 0))
                if rule is None:
                    if not _takes_any_number(op):
                        _refuse_shape(state, op)
                    rule = self._rule_of_any[kind]
                if kind in REVISITED:
                    concerned.append(index)
                rule(state, op)
            elif op[4] in arrived:
                arrive(state, op)
            else:
                if op[4] not in state.in_flight:
                    refuse_second_wait(state, op)
                state.waits_for = op[4]
                return
        state.at = len(ops)


FREE, WAIT = OpKind.FREE, OpKind.WAIT


LOAD_OPT_STATE = OpKind.LOAD_OPT_STATE


def trained_layers(program: Program) -> int:
    """Return the bit set of the layers whose optimizer state any rank loads. The other layers are frozen.

    If no rank loads any, the result is all layers, so that a program that trains nothing is refused.
    """
    sizes, trained = program.sizes, 0
    for layer in {op[1] for tape in program.tapes for op in tape if op[0] is LOAD_OPT_STATE}:
        if 0 <= layer < program.layers:  # a tape from a file may name any layer
            trained |= sizes.layers_of_weight(layer)
    return trained or (1 << program.layers) - 1


def check_rank_ending(state: RankState) -> None:
    """Check that no communication is in flight, and that only the loaded slices are live, each updated once or frozen.

    Raises:
        Refused: with a value that is missing or left over.
    """
    for issue_op in state.in_flight.values():
        state.refuse("in flight", "is still in flight when the step ends", "wait for it", issue_op)
    live_specs = set(state.live.values())
    finals: set[Spec] = set()
    for (kind, layer, holds), load_op in state.loads.items():
        trained = state.trained >> layer & 1
        final = Spec(form_of(kind, layer, trained, state.rules.space, holds, place=state.ops[load_op].place))
        finals.add(final)
        if final not in live_specs and not trained:
            fault = f"the step ends without {final}; no rank loads an optimizer state of layer {layer}, so it is frozen"
            state.refuse("frozen and not kept", fault, "keep the weight that is loaded in a store", load_op)
        if final not in live_specs:
            lacking = f"the step ends without the updated {_without_step(final)}"
            if final in state.specs.values():
                value = max(number for number, spec in state.specs.items() if spec == final)
                maker = next(index for index, op in enumerate(state.ops) if value in op.outputs)
                state.refuse("not kept", f"{lacking}, which is made here and not kept", "keep it in its store", maker)
            of_layer = (spec for spec in state.specs.values() if (spec.kind, spec.layer) == (kind, layer))
            updated = [spec for spec in dict.fromkeys(of_layer) if spec.step == final.step]
            if parts := [_without_step(spec) for spec in updated if holds.contains(spec.holds)]:
                fault = f"{lacking}, of which only {' and '.join(parts)} {'was' if len(parts) == 1 else 'were'} made"
                remedy = "gather or concatenate all its slices, or load only what is updated"
                state.refuse("not kept", fault, remedy, load_op)
            fault = f"{state.specs[state.ops[load_op].outputs[0]]} is loaded here and never updated"
            state.refuse("never updated", fault, "update every slice that is loaded, once", load_op)
    end = len(state.ops)
    for number, spec in state.live.items():
        if spec not in finals:
            fault = f"the step ends with value {number}, {spec}, still live; a step leaves only the slices it loaded"
            state.refuse("left over", fault, "free it", end)
        if spec not in live_specs:
            fault = f"the step ends with value {number}, {spec}, which is live already; a step leaves each slice once"
            state.refuse("left over", fault, "free one of them", end)
        live_specs.remove(spec)


def _without_step(spec: Spec) -> str:
    """Return an updated value as text, without the number of its updates."""
    return str(spec._replace(form=spec.form.but(step=0)))


def check_coverage(states: Sequence[RankState], layers: int) -> None:
    """Check that the ranks load every slice of every layer, and that all updates clip the gradient, or none does.

    Raises:
        Refused: for the first slice that no rank loads, or an update that does not clip although others do.
    """
    clips = {state.clips: state for state in reversed(states) if state.clips is not None}
    if len(clips) > 1:
        plain = clips[False]
        index = next(index for index, op in enumerate(plain.ops) if op.kind in (OpKind.UPDATE, OpKind.DIRECTION))
        fault = (
            f"is not given the gradient's norm, but rank {clips[True].index}'s updates are; replicas would drift apart "
            "and layers learn at different rates"
        )
        plain.refuse("norm on some ranks", fault, "give the norm to all updates", index)
    coverage = [Holds(0, 1)] * layers
    for state in states:
        for kind, layer, holds in state.loads:
            if kind is Kind.WEIGHT:
                coverage[layer] |= holds
    weight_of = states[0].program.sizes.weight_of
    for layer, (mask, of) in enumerate(coverage):
        if weight_of(layer) == layer and not coverage[layer].complete:
            missing = ~mask & (1 << of) - 1
            lacking = f"{numbered('slice', missing)} of {of}" if of > 1 else "this weight"
            fault = f"no rank loads {lacking}, so no rank updates it"
            remedy = "load and update every slice of every layer on at least one rank"
            raise Refused("not loaded", About(f"weights[{layer}]", layer), fault, remedy, missing=bits(missing))


def check_losses(states: Sequence[RankState]) -> None:
    """Check that ranks compute the loss of every piece of every microbatch, and load no optimizer state.

    Raises:
        Refused: for the first microbatch whose loss no rank computes, or for a loaded optimizer state.
    """
    computed = 0
    for state in states:
        for (kind, _, _), index in state.loads.items():
            if kind is Kind.OPT_STATE:
                state.refuse("not kept", "is loaded, but nothing is trained here", "leave it out", index)
        for op in state.ops:
            if op.kind is OpKind.LOSS:
                computed |= state.specs[op.inputs[0]].cells
    space = states[0].rules.space
    if missing := ~computed & (1 << space.cells) - 1:
        fault = f"no rank computes the loss of {microbatches_text(microbatches_of(missing, space))}"
        raise Refused("missing microbatches", "", fault, "compute every microbatch's loss", missing=bits(missing))


REVISITED = in_place.REVISITED | runnable.REVISITED
"""Ops that later checks read again after the replay."""

SHAPES = frozenset(
    (kind, reads, makes, handle)
    for kind in OpKind
    for reads in kind.row.inputs
    for makes in kind.row.outputs
    for handle in ((False, True) if kind in COMMUNICATION else (False,))
)
"""Allowed shapes of an op: (op, number of inputs, number of outputs, whether it has a handle).

A communication without a handle is refused when it is issued.
"""


Rule = Callable[[RankState, Op], None]

NOTHING_SAVED: dict[Form, int] = {}
"""Placeholder for an activation with which layers have saved no values."""


def forward(state: RankState, op: Op) -> None:
    live, inputs, outputs = state.live, op[2], op[3]
    activation, weight = inputs[0], inputs[1]
    specs = [live[activation]]
    if len(inputs) > 2:
        specs += [live[number] for number in inputs[2:]]
    output_specs, saved_spec = state.layer(op).forward(specs, live[weight], "forward", op[7])
    count = len(output_specs)
    state.make_all(outputs[:count], output_specs)
    if len(outputs) == count + 1:
        _save(state, outputs[count], activation, saved_spec)
    elif len(outputs) > count:
        fault = f"has {counted(len(outputs), 'output')}, but this layer makes {counted(count, 'value')}"
        state.refuse("malformed tape", fault, "number these outputs, and the saved value")


def recompute(state: RankState, op: Op) -> None:
    (activation, weight), (saved_number,) = op[2], op[3]
    rules, spec = state.layer(op), state.live[activation]
    if not rules.layer.recomputed:
        fault = f"this {rules.layer.name} layer takes or makes several values, and is not recomputed"
        state.refuse("no forward", fault, "save what its forward makes")
    _save(state, saved_number, activation, rules.forward([spec], state.live[weight], "recompute")[1])


def backward(state: RankState, op: Op) -> None:
    state.make_all(op[3], _backward(state, op)[0])


def backward_input(state: RankState, op: Op) -> None:
    *outputs, half = op[3]
    activation = op[2][0]
    specs, result = _backward(state, op)
    state.make_all(outputs, specs[1:])
    state.note(half, Spec(result.half_form, state.live[activation].cells))
    state.half_of.setdefault(activation, {})[result.half_form] = half


def backward_weight(state: RankState, op: Op) -> None:
    (activation, gradient, half), (grad_weight,) = op[2], op[3]
    spec, grad_spec = state.live[activation], state.live[gradient]
    if half not in state.specs or state.half_of.get(activation, NOTHING_SAVED).pop(state.specs[half][0], None) != half:
        fault = f"value {half} is not the value that the first half of this activation's backward left for it"
        state.refuse("no forward", fault, "read the value that it left, once")
    state.make(grad_weight, state.layer(op).backward_weight(spec, [grad_spec], state.specs[half]))


def add(state: RankState, op: Op) -> None:
    (a, b), (total,) = op[2], op[3]
    spec = arithmetic.add_two(state.live[a], state.live[b])
    state.want_layer(op, spec[0].layer)
    state.make(total, spec)


def direction(state: RankState, op: Op) -> None:
    inputs = [state.live[number] for number in op[2]]
    spec = state.rules.direction(op[1], inputs, state.trained)
    _require_same_clipping(state, op, *inputs[2:])
    state.make(op[3][0], spec)


def update(state: RankState, op: Op) -> None:
    new_weight, new_state = op[3]
    live = state.live
    inputs = [live[number] for number in op[2]]
    new_specs = state.rules.update(op[1], inputs, state.trained)
    _require_same_clipping(state, op, steps.norm_and_direction(inputs[3:])[0])
    for number in (op[2][place] for place in OpKind.UPDATE.row.ends):
        if state.reading.get(number):
            state.refuse("in flight", f"{live[number]} is still read by a communication in flight", "wait for it first")
        del live[number]
    state.make(new_weight, new_specs[0])
    state.make(new_state, new_specs[1])


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
    state.make(op[3][0], collectives.slice_of(spec, holds.mask.bit_length() - 1, holds.of))


def concatenate(state: RankState, op: Op) -> None:
    specs = [state.live[number] for number in op[2]]
    state.want_layer(op, specs[0].layer)
    state.make(
        op[3][0], collectives.gather(specs[0].about("concatenate"), specs, MemberNames(range(len(specs)), "piece"))
    )


def load_batch(state: RankState, op: Op) -> None:
    holds, (), (activation,) = op.holds, op[2], op[3]
    space = state.rules.space
    microbatches, cells = space.microbatches, space.cells
    if holds is None or holds.of not in (microbatches, cells) or not 0 < holds.mask < 1 << holds.of:
        fault = f"{_holds_text(holds)} is not a set of the step's {microbatches} microbatches"
        state.refuse("unknown microbatch", fault, "name some of them")
    state.want_layer(op, 0)
    state.make(activation, Spec(form_of(Kind.ACTIVATION, 0, 0, space), holds.refined(cells).mask))


def scale(state: RankState, op: Op) -> None:
    spec, steps = state.live[op[2][0]], state.rules.space.microbatches
    if op.factor is None or not all(0 < mask < 1 << steps for mask, _ in op.factor.tokens):
        fault = f"{op.factor} is not a rational times counts of tokens of the step's microbatches"
        state.refuse("wrong factor", fault, "give such a factor")
    state.want_layer(op, spec.layer)
    state.make(op[3][0], arithmetic.scale(spec, op.factor))


def cast(state: RankState, op: Op) -> None:
    spec = state.live[op[2][0]]
    state.want_layer(op, spec.layer)
    state.make(op[3][0], arithmetic.cast(spec, op.dtype))


def zero_gradient(state: RankState, op: Op) -> None:
    holds = _slice_of_weights(state, op)
    state.make(op[3][0], Spec(form_of(Kind.GRAD_WEIGHT, op[1], 0, state.rules.space, holds)))


def _load(kind: Kind, state: RankState, op: Op) -> None:
    holds, layer, (number,) = _slice_of_weights(state, op), op[1], op[3]
    if (kind, layer, holds) in state.loads:
        fault = f"the same slice was loaded by op {state.loads[kind, layer, holds]} already"
        state.refuse("loaded twice", fault, "load each slice once")
    if op.place:
        require_place(op.about, op.place)
    state.loads[kind, layer, holds] = state.at
    state.make(number, Spec(form_of(kind, layer, 0, state.rules.space, holds, place=op.place)))


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


def _takes_any_number(op: Op) -> bool:
    """Return whether an op is of a kind that takes any number of inputs, and has inputs and the right outputs."""
    row = op.kind.row
    return not row.inputs and len(op.inputs) > 0 and len(op.outputs) in row.outputs and op.handle < 0


def _refuse_shape(state: RankState, op: Op) -> NoReturn:
    """Refuse an op with a number of inputs or outputs that its kind never has, or a compute op with a handle."""
    if op.handle >= 0 and op.kind not in COMMUNICATION:
        fault = f"has handle {op.handle}, but only a collective or a message has one"
        state.refuse("malformed tape", fault, "leave it out")
    has = f"has {counted(len(op.inputs), 'input')} and {counted(len(op.outputs), 'output')}"
    state.refuse("malformed tape", f"{has}, numbers that this op never has", "give the values that it reads and makes")


def _save(state: RankState, number: int, activation: int, spec: Spec) -> None:
    """Record the value that a layer saves in a forward pass.

    It belongs to the activation. It ends with the activation, with the backward pass, or with a newer value of the
    same form.
    """
    state.note(number, spec)
    state.saved_of.setdefault(activation, {})[spec[0]] = number


def _backward(state: RankState, op: Op) -> tuple[list[Spec], BackwardResult]:
    """Return the specs that both halves of a backward pass make, and the forms of all results of the pass."""
    live, inputs = state.live, op[2]
    activation, gradient, weight, saved_number = inputs[0], inputs[1], inputs[2], inputs[3]
    gradients = [live[gradient]]
    if len(inputs) > 4:
        gradients += [live[number] for number in inputs[4:]]
    specs, result = state.layer(op).backward(live[activation], gradients, live[weight])
    saved_values = state.saved_of.get(activation, NOTHING_SAVED)
    if saved_values.pop(result.saved_form, None) != saved_number:
        if saved_number in saved_values.values():
            fault = "the forward pass was by other slices of the layer than the weight and the gradient"
            state.refuse("other forward", fault, "give the slices of the forward pass")
        fault = f"value {saved_number} is not the value that the layer saved in this activation's forward"
        state.refuse("no forward", fault, "read the value that it saved, once")
    return specs, result


def _require_same_clipping(state: RankState, op: Op, norm: Spec | None = None) -> None:
    """Refuse a norm over frozen layers, and a norm for some updates of this rank but not for all."""
    if norm is not None:
        steps.require_no_frozen(op.about, norm, Holds(state.trained, state.program.layers))
    if state.clips is not None and state.clips != (norm is not None):
        fault = "some updates of this rank are given the gradient's norm and some are not"
        state.refuse("norm for some", fault, "give it to all")
    state.clips = norm is not None


def _computed(rule: Callable[..., Spec | Sequence[Spec]], state: RankState, op: Op) -> None:
    """Replay an op whose rule takes the op's layer and all its inputs."""
    result = rule(op[1], *[state.live[number] for number in op[2]])
    state.make_all(op[3], (result,) if isinstance(result, Spec) else result)


def _slice_of_weights(state: RankState, op: Op) -> Holds:
    """Return the slices of a layer's weights that an op loads, and refuse slices that do not exist."""
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
        state.refuse("tied weight", TIED_HEAD, TIED_HEAD_REMEDY)
    return holds


def _holds_text(holds: Holds | None) -> str:
    """Return the pieces that an op names, as text for an error message. A tape from a file may have a negative mask."""
    return str(holds) if holds is None or holds.mask >= 0 else f"bit set {holds.mask} of {holds.of}"
