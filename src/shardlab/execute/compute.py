"""What each compute op of a tape does to the registers: prepared once, called at every step."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from shardlab.execute import attention, slicing, written
from shardlab.execute.gradient_room import gradient_room, own_columns, parameters_of
from shardlab.execute.graph import FlatWeight, Graph
from shardlab.execute.saved import Saved
from shardlab.execute.state import State
from shardlab.execute.updating import Instruction, direction, norm, update
from shardlab.models import tensors
from shardlab.models.tensors import loss_of
from shardlab.models.tensors.tokens import rows_of, sent_to
from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.rules.pieces import bits


def load_weight(state: State, at: int, op: Op) -> Instruction:
    """The slice that the rank keeps, bound again at every step."""
    assert op.holds is not None
    kept, (weight,), values = state.kept[op.layer, op.holds], op.outputs, state.values
    return lambda: values.__setitem__(weight, kept)


def load_opt_state(state: State, at: int, op: Op) -> Instruction:
    """The optimizer state that the rank keeps."""
    assert op.holds is not None
    kept, (opt_state,), values = state.opt_states[op.layer, op.holds], op.outputs, state.values
    return lambda: values.__setitem__(opt_state, kept)


def scale(state: State, at: int, op: Op) -> Instruction:
    """A gradient times a number that this step's tokens tell; in place where nobody reads it any more."""
    (given,), (output,), values, factor = op.inputs, op.outputs, state.values, op.factor
    in_place = at in state.analysis.in_place.first_input
    assert factor is not None

    def run() -> None:
        number = float(factor.ratio)
        for microbatches, power in factor.tokens:
            number *= float(state.tokens_of(microbatches)) ** power
        values[output] = values[given].mul_(number) if in_place else values[given] * number

    return run


def cast(state: State, at: int, op: Op) -> Instruction:
    """The value in other numbers, always in memory of its own; a weight in a buffer."""
    (given,), (output,), values = op.inputs, op.outputs, state.values
    dtype, slot = state.dtype(state.specs[output]), state.analysis.slot.get(output)

    def run() -> None:
        tensor: Tensor = values[given]
        values[output] = (
            tensor.to(dtype, copy=True) if slot is None else state.fill_buffer(slot, len(tensor)).copy_(tensor)
        )

    return run


def zero_gradient(state: State, at: int, op: Op) -> Instruction:
    (output,), values = op.outputs, state.values
    return lambda: values.__setitem__(output, state.room(output).zero_())


def load_batch(state: State, at: int, op: Op) -> Instruction:
    """The tokens of some microbatches, one after the other."""
    assert op.holds is not None
    output, values = op.outputs[0], state.values

    def run() -> None:
        values[output] = _rows(state, state.specs[output], 0)

    return run


def _rows(state: State, spec: Spec, which: int) -> Tensor:
    """What a value holds of this step's tokens (0) or targets (1): (rows, tokens) on the device."""
    rows = torch.cat([state.batch[m][which] for m in bits(spec.microbatches)])
    if not spec.whole_sequences:
        rows = rows_of(rows.T, state.shapes.tokens(spec)).T.contiguous()
    return sent_to(state.settings.device, rows)


def forward(state: State, at: int, op: Op) -> Instruction:
    """A layer; with its graph, if the tape saves one."""
    saves = state.specs[op.outputs[-1]].kind is Kind.SAVED
    if saves and op.layer in state.written:
        return written.forward(state, at, op, state.written[op.layer])
    layer, (x, weight, *carried), values = state.layers[op.layer], op.inputs, state.values
    share, halved = state.share(op), at in state.analysis.halved
    keeps = state.keeps_inputs(op.layer)
    over = at in state.analysis.last_reads
    outputs = op.outputs[: len(op.outputs) - saves]

    def inputs() -> list[Tensor]:
        return [values[number] for number in (x, *carried)]

    def run() -> None:
        flat = state.flat_weight(op.layer, weight)
        settings = state.scaled(share), state.dropout(op), _saved(state, at, op, flat)
        graph = Graph(layer, inputs(), flat, *settings, keeps_inputs=keeps, in_halves=halved)
        for number, made in zip(outputs, graph.take_outputs(), strict=True):
            values[number] = made
        values[op.outputs[-1]] = graph
        if over:
            values[x] = None  # autograd has what it needs of it

    def run_without_saving() -> None:
        with torch.no_grad():
            leaves = state.flat_weight(op.layer, weight).leaves
            made = layer.run(leaves, inputs(), share, state.dropout(op))
        for number, each in zip(outputs, made, strict=True):
            values[number] = each

    return run if saves else run_without_saving


def _saved(state: State, at: int, op: Op, weight: FlatWeight) -> Saved | None:
    """What autograd saves into, where the executor has a hand in it: for a weight that will lie elsewhere, and for a
    second half of the backward pass that reads some of it, or may."""
    moved, halved = at in state.analysis.moved, at in state.analysis.halved
    return Saved(weight.flat) if moved or (halved and state.reads.get(op.layer) != set()) else None


def recompute(state: State, at: int, op: Op) -> Instruction:
    """A layer again, for its graph alone."""
    if op.layer in state.written:
        return written.forward(state, at, op, state.written[op.layer])
    layer, (x, weight), saved, values = state.layers[op.layer], op.inputs, op.outputs[0], state.values
    over = at in state.analysis.last_reads
    share, halved = state.share(op), at in state.analysis.halved
    keeps = state.keeps_inputs(op.layer)

    def run() -> None:
        flat = state.flat_weight(op.layer, weight)
        settings = state.scaled(share), state.dropout(op), _saved(state, at, op, flat)
        graph = Graph(layer, [values[x]], flat, *settings, keeps_inputs=keeps, in_halves=halved)
        graph.take_outputs()
        values[saved] = graph
        if over:
            values[x] = None

    return run


def loss_stats(state: State, at: int, op: Op) -> Instruction:
    """What the loss needs of the slice of the logits that is here."""
    (x,), (output,), values = op.inputs, op.outputs, state.values
    first = state.first_token(state.specs[x])

    def run() -> None:
        values[output] = tensors.loss_stats(values[x], _rows(state, state.specs[x], 1), first)

    return run


def loss(state: State, at: int, op: Op) -> Instruction:
    """Cross-entropy, each token weighted by its share of the step's tokens, so that sums are exact means.

    Where the tape wants no gradient, none is computed.
    """
    (x, *stats), values = op.inputs, state.values
    spec = state.specs[x]
    slices = 1 if spec.whole_sequences else len(state.shapes.slices(spec))
    pieces = list(bits(spec.cells))[:: spec.form.space.sequence if spec.whole_sequences else 1]
    reported = [place for place, piece in enumerate(pieces) if state.loss_owners[piece] == (state.rank, at)]
    first = state.first_token(spec) if stats else 0

    def apart(whole: Tensor, dim: int = 0) -> list[Tensor]:
        """The pieces of something with rows in `dim` and tokens in the next dim."""
        if len(pieces) == 1:
            return [whole]
        rows = whole.chunk(spec.microbatches.bit_count(), dim)
        return [piece for row in rows for piece in row.chunk(slices, dim + 1)]

    def report(losses: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for place in reported:
            state.loss[0] += losses[place].detach()
            state.loss[1] += (targets[place] >= 0).sum()

    def run() -> None:
        logits: Tensor = values[x].detach().requires_grad_(bool(op.outputs))
        targets = apart(_rows(state, spec, 1))
        losses = [loss_of(part, its) for part, its in zip(apart(logits), targets, strict=True)]
        for output in op.outputs:
            (values[output],) = torch.autograd.grad(
                torch.stack(losses).sum() / (state.tokens / state.loss_scale.scale), logits
            )
        report(losses, targets)

    def run_on_slices() -> None:
        logits: Tensor = values[x]
        whole = _rows(state, spec, 1)
        gathered = values[stats[0]].view(-1, *whole.shape, 3)  # (slices, rows, T, 3)
        for output in op.outputs:
            scale = state.loss_scale.scale / state.tokens
            values[output] = tensors.loss_gradient(logits, gathered, whole, first, scale)
        parts, targets = apart(gathered, 1), apart(whole)
        report([tensors.combined_loss(part, its) for part, its in zip(parts, targets, strict=True)], targets)

    return run_on_slices if stats else run


def backward(state: State, at: int, op: Op) -> Instruction:
    """Through the graph that FORWARD or RECOMPUTE left; adds to an older gradient where an ADD would follow."""
    if op.layer in state.written:
        return written.backward(state, at, op, state.written[op.layer])
    (_, gradient, weight, saved, *carried), (grad_weight, *outputs), values = op.inputs, op.outputs, state.values
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)
    own = own_columns(state, op)

    def run() -> None:
        graph: Graph = values[saved]
        values[saved] = None
        into = room()
        gradients = [own(values[number]) for number in (gradient, *carried)]
        for number, made in zip(
            outputs, graph.backward(gradients, values[weight], parameters_of(into, layout)), strict=False
        ):
            values[number] = made  # there is none for tokens
        values[grad_weight] = into

    return run


def backward_input(state: State, at: int, op: Op) -> Instruction:
    """The half that gives the input's gradient; the graph stays for the other half."""
    if op.layer in state.written:
        return written.backward_input(state, at, op, state.written[op.layer])
    (_, gradient, weight, saved, *carried), (*outputs, half), values = op.inputs, op.outputs, state.values
    own = own_columns(state, op)

    def run() -> None:
        graph: Graph = values[saved]
        gradients = [own(values[number]) for number in (gradient, *carried)]
        made = graph.backward_input(gradients, values[weight], state.reads.get(op.layer))
        for number, gradient_made in zip(outputs, made, strict=False):
            values[number] = gradient_made
        values[saved], values[half] = None, graph

    return run


def backward_weight(state: State, at: int, op: Op) -> Instruction:
    """The half that gives the weight's gradient, added to an older one where an ADD would follow."""
    if op.layer in state.written:
        return written.backward_weight(state, at, op, state.written[op.layer])
    half, grad_weight, values = op.inputs[2], op.outputs[0], state.values
    layout, room = state.shapes.layout_of_weight(op.layer), gradient_room(state, at, op)

    def run() -> None:
        graph: Graph = values[half]
        values[half] = None
        into = room()
        reads = graph.backward_weight(parameters_of(into, layout))
        state.reads.setdefault(op.layer, reads)
        values[grad_weight] = into

    return run


def add(state: State, at: int, op: Op) -> Instruction:
    """A sum of gradients; in place where nobody reads the first one any more."""
    term = state.specs[op.inputs[0]].form.term
    if term is not None and term.merged:
        return attention.merge(state, op)
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    fused, in_place = at in state.analysis.in_place.fused, at in state.analysis.in_place.first_input

    def run() -> None:
        if fused:  # BACKWARD has added its gradient to the older one: both values are that buffer
            values[output] = values[a]
        else:
            values[output] = values[a].add_(values[b]) if in_place else values[a] + values[b]

    return run


def free(state: State, at: int, op: Op) -> Instruction:
    """Drop a value, and with an activation what autograd saved from its forward."""
    number, values = op.inputs[0], state.values
    saved, slot = state.analysis.saved_of[number], state.analysis.empties.get(at)
    kept = state.analysis.leaves_room.get(at)

    def run() -> None:
        values[number] = None
        if slot is not None:
            state.empty_buffer(slot)
        if kept is not None:
            state.give_back(kept)
        for each in saved:
            values[each] = None

    return run


COMPUTE: dict[OpKind, Callable[[State, int, Op], Instruction]] = {
    OpKind.LOAD_WEIGHT: load_weight,
    OpKind.LOAD_OPT_STATE: load_opt_state,
    OpKind.LOAD_BATCH: load_batch,
    OpKind.FORWARD: forward,
    OpKind.RECOMPUTE: recompute,
    OpKind.ATTEND: attention.attend,
    OpKind.ATTEND_BACKWARD: attention.attend_backward,
    OpKind.LOSS_STATS: loss_stats,
    OpKind.LOSS: loss,
    OpKind.BACKWARD: backward,
    OpKind.BACKWARD_INPUT: backward_input,
    OpKind.BACKWARD_WEIGHT: backward_weight,
    OpKind.NORM: norm,
    OpKind.ADD: add,
    OpKind.SCALE: scale,
    OpKind.CAST: cast,
    OpKind.ZERO_GRADIENT: zero_gradient,
    OpKind.SLICE: slicing.slice_,
    OpKind.CONCATENATE: slicing.concatenate,
    OpKind.DIRECTION: direction,
    OpKind.UPDATE: update,
    OpKind.FREE: free,
}
