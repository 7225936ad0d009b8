"""What each compute op of a tape does to the registers: prepared once, called at every step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from shardlab.execute.graph import Graph
from shardlab.execute.optimizer import Slice
from shardlab.execute.state import State
from shardlab.models.tensors import Dropout, initial_weights, lengthened, loss_of, views
from shardlab.program import Holds, Op, OpKind
from shardlab.program.values import bits

Instruction = Callable[[], None]


def load_weights(state: State, at: int, op: Op) -> Instruction:
    """The slice that the rank keeps; made here, from the seed alone, and bound again at every step."""
    assert op.holds is not None
    settings, layer = state.settings, op.layer
    whole = initial_weights(state.model, layer, settings.seed, settings.dtype)
    padded = lengthened(state.shapes.layouts[layer], whole, state.shapes.flat[layer])
    ranges = state.shapes.ranges(layer, op.holds)
    flat = torch.cat([padded[start:stop] for start, stop in ranges]).to(settings.device)
    decayed = state.shapes.layouts[layer].decayed_runs(state.shapes.flat[layer])
    kept = Slice(flat, ranges, decayed, settings.optimizer)
    state.slices[layer, op.holds] = kept
    (weight, opt_state), values = op.outputs, state.values

    def run() -> None:
        values[weight], values[opt_state] = kept.flat, kept

    return run


def load_batch(state: State, at: int, op: Op) -> Instruction:
    """The tokens of some microbatches, one after the other."""
    assert op.holds is not None
    numbers, output, values = list(bits(op.holds.mask)), op.outputs[0], state.values

    def run() -> None:
        values[output] = torch.cat([state.batch[m][0] for m in numbers]).to(state.settings.device)

    return run


def forward(state: State, at: int, op: Op) -> Instruction:
    """A layer; with its graph, if the tape saves one."""
    layer, (x, weight), values = state.layers[op.layer], op.inputs, state.values
    output, saved = op.outputs[0], op.outputs[-1]
    regathered = at in state.analysis.regathered

    def run() -> None:
        graph = Graph(layer, values[x], state.flat_weight(op.layer, weight), _dropout(state, op), regathered)
        values[output], values[saved] = graph.take_output(), graph

    def run_without_saving() -> None:
        with torch.no_grad():
            values[output] = layer(state.flat_weight(op.layer, weight).leaves, values[x], _dropout(state, op))

    return run if len(op.outputs) > 1 else run_without_saving


def recompute(state: State, at: int, op: Op) -> Instruction:
    """A layer again, for its graph alone."""
    layer, (x, weight), saved, values = state.layers[op.layer], op.inputs, op.outputs[0], state.values
    regathered = at in state.analysis.regathered

    def run() -> None:
        graph = Graph(layer, values[x], state.flat_weight(op.layer, weight), _dropout(state, op), regathered)
        graph.take_output()
        values[saved] = graph

    return run


def _dropout(state: State, op: Op) -> Dropout | None:
    if not state.model.dropout:
        return None
    microbatches = tuple(bits(state.specs[op.inputs[0]].holds.mask))
    return Dropout(state.model.dropout, state.settings.seed, state.step, op.layer, microbatches)


def loss(state: State, at: int, op: Op) -> Instruction:
    """Cross-entropy, each token weighted by its share of the step's tokens, so that sums are exact means."""
    (x,), (output,), values = op.inputs, op.outputs, state.values
    numbers = list(bits(state.specs[x].holds.mask))
    reported = [place for place, m in enumerate(numbers) if state.loss_owners[m] == (state.rank, at)]

    def run() -> None:
        logits: Tensor = values[x].detach().requires_grad_()
        targets = [state.batch[m][1].to(logits.device) for m in numbers]
        losses = [loss_of(part, its) for part, its in zip(logits.chunk(len(numbers)), targets, strict=True)]
        (values[output],) = torch.autograd.grad(torch.stack(losses).sum() / state.tokens, logits)
        for place in reported:
            state.loss[0] += losses[place].detach().double().cpu()
            state.loss[1] += (targets[place] >= 0).sum().cpu()

    return run


def backward(state: State, at: int, op: Op) -> Instruction:
    """Through the graph that FORWARD or RECOMPUTE left; adds to an older gradient where an ADD would follow."""
    (_, gradient, weight, saved), (grad_weight, grad_x), values = op.inputs, op.outputs, state.values
    layout, length = state.shapes.layouts[op.layer], state.shapes.flat[op.layer]
    total = state.analysis.in_place.accumulates.get(at)
    settings = state.settings

    def run() -> None:
        graph: Graph = values[saved]
        values[saved] = None
        into = torch.zeros(length, dtype=settings.dtype, device=settings.device) if total is None else values[total]
        values[grad_x] = graph.backward(values[gradient], values[weight], views(layout, into))
        values[grad_weight] = into

    return run


def add(state: State, at: int, op: Op) -> Instruction:
    """A sum of gradients; in place where nobody reads the first one any more."""
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    fused, in_place = at in state.analysis.in_place.fused, at in state.analysis.in_place.first_input

    def run() -> None:
        if fused:  # BACKWARD has added its gradient to the older one: both values are that buffer
            values[output] = values[a]
        else:
            values[output] = values[a].add_(values[b]) if in_place else values[a] + values[b]

    return run


def update(state: State, at: int, op: Op) -> Instruction:
    """AdamW on the slice that the rank keeps, in place."""
    (gradient, weight, opt_state), (new_weight, new_opt_state), values = op.inputs, op.outputs, state.values
    holds = state.specs[weight].holds
    places = _places(state, op.layer, state.specs[gradient].holds, holds)
    slot = state.analysis.slot.get(weight)

    def run() -> None:
        whole: Tensor = values[gradient]
        parts = [whole[start:stop] for start, stop in places]
        given = parts[0] if len(parts) == 1 else torch.cat(parts)
        if state.observer is not None:
            state.observer(op.layer, holds, given)
        kept: Slice = values[opt_state]
        kept.update(given, state.step)
        values[weight] = values[opt_state] = None
        values[new_weight], values[new_opt_state] = kept.flat, kept
        if slot is not None:  # the weight was received; the rank's own slice takes its place
            state.empty_buffer(slot)

    return run


def _places(state: State, layer: int, holds: Holds, wanted: Holds) -> list[tuple[int, int]]:
    """Where the wanted slices lie in the tensor of a value that holds these and perhaps more."""
    places: list[tuple[int, int]] = []
    at = 0
    for start, stop in state.shapes.ranges(layer, holds):
        for begin, end in state.shapes.ranges(layer, wanted):
            if start <= begin and end <= stop:
                places.append((at + begin - start, at + end - start))
        at += stop - start
    return places


def free(state: State, at: int, op: Op) -> Instruction:
    """Drop a value, and with an activation what autograd saved from its forward."""
    number, values = op.inputs[0], state.values
    saved, slot = state.analysis.saved_of[number], state.analysis.slot.get(number)

    def run() -> None:
        values[number] = None
        if slot is not None:
            state.empty_buffer(slot)
        for each in saved:
            values[each] = None

    return run


COMPUTE: dict[OpKind, Callable[[State, int, Op], Instruction]] = {
    OpKind.LOAD_WEIGHTS: load_weights,
    OpKind.LOAD_BATCH: load_batch,
    OpKind.FORWARD: forward,
    OpKind.RECOMPUTE: recompute,
    OpKind.LOSS: loss,
    OpKind.BACKWARD: backward,
    OpKind.ADD: add,
    OpKind.UPDATE: update,
    OpKind.FREE: free,
}
