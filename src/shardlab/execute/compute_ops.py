"""Compute ops: for each kind, a function that prepares the op once and returns the call that each step makes.

`COMPUTE` lists them. A call reads and writes `State.values`, the tensors by value number. A forward pass saves the
tensors that its backward pass reads, and the backward pass frees them. A backward pass looks up its weight again,
because a gathered weight may be in another buffer by then.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from typing import Any

import torch
from torch import Tensor

from shardlab.execute import slicing
from shardlab.execute.state import State
from shardlab.execute.update_ops import Instruction, direction, norm, update
from shardlab.language import Kind, Op, OpKind, Spec
from shardlab.language.rules.kinds import bits
from shardlab.language.rules.spec import fraction_held
from shardlab.models import LayerLayout, tensors
from shardlab.models.attention import Attend
from shardlab.models.primitives import DropoutSite
from shardlab.models.tensors import (
    Accumulate,
    AddGradients,
    attention,
    cross_entropy_backward,
    log_probabilities,
    loss_of,
    parameter_views,
)
from shardlab.models.tensors.attention import select_rows, to_device

Waiting = list[tuple[AddGradients, Tensor, Tensor]]
"""Gradients of parameters that the first half of a split backward pass leaves to the second half: (function that adds
the gradient, gradient of the result, input)."""


def forward(state: State, at: int, op: Op) -> Instruction:
    """Run a layer. If the op has a saved value as an output, store in it the tensors that the backward pass reads.

    A RECOMPUTE has only this output.
    """
    (x, weight, *carried), values, passes = op.inputs, state.values, state.passes[op.layer]
    saves = state.specs[op.outputs[-1]].kind is Kind.SAVED
    outputs, saved = op.outputs[: len(op.outputs) - saves], op.outputs[-1]
    share, run_of_layer = state.share(op), state.model.run(op.layer)
    factor = state.analysis.gradient_factor.get(saved) if run_of_layer.affine else None
    # The second half of a split backward pass reads the input, and the memory model counts it.
    stays = at in state.analysis.halved and run_of_layer.keeps_input
    over = at in state.analysis.last_reads and not stays

    def run() -> None:
        given, weights = [values[number] for number in (x, *carried)], state.weights_of(op.layer, weight)
        scaled = share if factor is None else state.scaled(share, factor)
        made, kept = passes.forward(given, weights, scaled, state.dropout(op), keeps=saves)
        for number, each in zip(outputs, made, strict=op.kind is OpKind.FORWARD):
            values[number] = each
        if saves:
            values[saved] = kept
            if over:
                values[x] = None  # the saved tensors include what is still needed

    return run


def backward(state: State, at: int, op: Op) -> Instruction:
    """Run the whole backward pass. If the tape only adds the weight gradient to an older one, accumulate it there."""
    grad_weight, *outputs = op.outputs
    layout, make_buffer = state.shapes.layout_of_weight(op.layer), gradient_buffer(state, at, op)
    back = _back(state, op, outputs)

    def run() -> None:
        into = make_buffer()
        totals = gradient_views(into, layout)
        back(lambda add, gradient, read: add(totals, gradient, read), [])
        state.values[grad_weight] = into

    return run


def backward_input(state: State, at: int, op: Op) -> Instruction:
    """Run the first half of a backward pass: the inputs' gradients. The parameters' gradients are deferred."""
    *outputs, half = op.outputs
    back = _back(state, op, outputs)

    def run() -> None:
        waiting: Waiting = []
        back(lambda add, gradient, read: waiting.append((add, gradient, read)), waiting)
        state.values[half] = waiting

    return run


def backward_weight(state: State, at: int, op: Op) -> Instruction:
    """Run the second half of a backward pass: the deferred gradients of the parameters."""
    half, grad_weight, values = op.inputs[2], op.outputs[0], state.values
    layout, make_buffer = state.shapes.layout_of_weight(op.layer), gradient_buffer(state, at, op)

    def run() -> None:
        waiting: Waiting = values[half]
        values[half] = None
        into = make_buffer()
        totals = gradient_views(into, layout)
        while waiting:
            add, gradient, read = waiting.pop(0)
            add(totals, gradient, read)
        values[grad_weight] = into

    return run


def attend(state: State, at: int, op: Op) -> Instruction:
    """Let queries attend to one part of the keys and values."""
    (queries, keys_values), (output,), values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        values[output] = attention.attend(part, values[queries], values[keys_values], tokens, key_tokens, mask())

    return run


def attend_backward(state: State, at: int, op: Op) -> Instruction:
    """Compute the gradient of one part of the keys and values, and this part's term of the queries' gradient."""
    (queries, keys_values, attention_output, gradient), outputs, values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        q, kv, mixed, grad = (values[number] for number in (queries, keys_values, attention_output, gradient))
        made = attention.attend_backward(part, q, kv, mixed, grad, tokens, key_tokens, mask())
        values[outputs[0]], values[outputs[1]] = made

    return run


def merge(state: State, op: Op) -> Instruction:
    """Merge the outputs of attention for two parts of the keys and values."""
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    part = _heads(state, op.layer - 1, state.specs[a])
    return lambda: values.__setitem__(output, attention.merge(part, values[a], values[b]))


def load_kept(state: State, at: int, op: Op) -> Instruction:
    """Set the op's output to weights, or to an optimizer state, that this rank keeps from step to step."""
    assert op.holds is not None
    kept = state.kept if op.kind is OpKind.LOAD_WEIGHT else state.opt_states
    tensors, (output,), values = kept[op.layer, op.holds], op.outputs, state.values
    return lambda: values.__setitem__(output, tensors)


def scale(state: State, at: int, op: Op) -> Instruction:
    """Multiply a gradient by a factor (see `Factor`), in place if no other op reads the gradient."""
    (given,), (output,), values, factor = op.inputs, op.outputs, state.values, op.factor
    in_place = at in state.analysis.in_place.first_input
    assert factor is not None

    def run() -> None:
        number = state.value_of(factor)
        values[output] = values[given].mul_(number) if in_place else values[given] * number

    return run


def cast(state: State, at: int, op: Op) -> Instruction:
    """Cast a value to another dtype. The result has new memory or, if it is a weight with a buffer, this buffer."""
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
    return lambda: values.__setitem__(output, state.memory_for(output).zero_())


def load_batch(state: State, at: int, op: Op) -> Instruction:
    """Load the tokens of some microbatches, concatenated."""
    assert op.holds is not None
    output, values = op.outputs[0], state.values

    def run() -> None:
        values[output] = _rows(state, state.specs[output], 0)

    return run


def loss_stats(state: State, at: int, op: Op) -> Instruction:
    """Reduce this rank's slice of the logits to the statistics that the loss needs."""
    (x,), (output,), values = op.inputs, op.outputs, state.values
    first = state.first_token(state.specs[x])

    def run() -> None:
        values[output] = tensors.loss_stats(values[x], _rows(state, state.specs[x], 1), first)

    return run


def loss(state: State, at: int, op: Op) -> Instruction:
    """Add the cross-entropy of the tokens that this op reports to `State.loss`, and compute the logits' gradient.

    The gradient is that of the sum over tokens, divided by the step's number of tokens and, in float16, multiplied by
    the loss scale. Sums over microbatches and ranks are therefore gradients of the mean. An op without an output
    computes no gradient.
    """
    (x, *stats), values = op.inputs, state.values
    spec = state.specs[x]
    microbatches = spec.microbatches.bit_count()
    owned = [state.loss_owners[cell] == (state.rank, at) for cell in bits(spec.cells)]
    slices = len(owned) // microbatches  # slices of each sequence, whose losses are summed separately
    if spec.whole_sequences and owned == [mine for mine in owned[::slices] for _ in range(slices)]:
        owned, slices = owned[::slices], 1  # no other rank reports any part of the batch
    first = state.first_token(spec) if stats else 0

    def apart(whole: Tensor, dim: int = 0) -> list[Tensor]:
        """Cut a tensor (rows in `dim`, tokens in the next dim) into the parts whose losses are summed separately."""
        if len(owned) == 1:
            return [whole]
        return [piece for row in whole.chunk(microbatches, dim) for piece in row.chunk(slices, dim + 1)]

    def report(losses: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for part_loss, part_targets in compress(zip(losses, targets, strict=True), owned):
            state.loss[0] += part_loss.detach()
            state.loss[1] += (part_targets >= 0).sum()

    def run() -> None:
        logits: Tensor = values[x]
        whole, log_probs = _rows(state, spec, 1), log_probabilities(logits)
        targets = apart(whole)
        losses = [loss_of(part, part_targets) for part, part_targets in zip(apart(log_probs), targets, strict=True)]
        for output in op.outputs:
            scale = torch.ones_like(losses[0]) / (state.tokens / state.loss_scale.scale)
            values[output] = cross_entropy_backward(log_probs, whole, scale, logits.dtype)
        report(losses, targets)

    def run_on_slices() -> None:
        logits: Tensor = values[x]
        whole = _rows(state, spec, 1)
        gathered = values[stats[0]].view(*whole.shape, -1, 3).movedim(2, 0)  # (slices, rows, T, 3)
        for output in op.outputs:
            scale = state.loss_scale.scale / state.tokens
            values[output] = tensors.loss_gradient(logits, gathered, whole, first, scale)
        parts, targets = apart(gathered, 1), apart(whole)
        report(
            [tensors.combine_loss(part, part_targets) for part, part_targets in zip(parts, targets, strict=True)],
            targets,
        )

    return run_on_slices if stats else run


def add(state: State, at: int, op: Op) -> Instruction:
    """Add two gradients; in place if no other op reads the first one."""
    term = state.specs[op.inputs[0]].form.term
    if term is not None and term.merged:
        return merge(state, op)
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    fused, in_place = at in state.analysis.in_place.fused, at in state.analysis.in_place.first_input

    def run() -> None:
        if fused:  # BACKWARD has already added its gradient to the older one, so both values are one buffer
            values[output] = values[a]
        else:
            values[output] = values[a].add_(values[b]) if in_place else values[a] + values[b]

    return run


def free(state: State, at: int, op: Op) -> Instruction:
    """Drop a value. If it is the input of a layer, also drop the tensors that the layer has saved for its backward."""
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
    OpKind.LOAD_WEIGHT: load_kept,
    OpKind.LOAD_OPT_STATE: load_kept,
    OpKind.LOAD_BATCH: load_batch,
    OpKind.FORWARD: forward,
    OpKind.RECOMPUTE: forward,
    OpKind.ATTEND: attend,
    OpKind.ATTEND_BACKWARD: attend_backward,
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


def gradient_buffer(state: State, at: int, op: Op) -> Callable[[], Tensor]:
    """Prepare the buffer of a layer's weight gradient: zeros, or the older gradient to which it is added."""
    total = state.analysis.in_place.accumulates.get(at)
    number, values = op.outputs[0], state.values
    spec = state.specs[number]
    if number in state.analysis.buckets.first and total is None:
        make = state.memory_beside(number)
        return lambda: make().zero_()
    if total is None and number in state.arena.tensors:
        return state.arena.tensors[number].zero_
    if total is None:
        shape, dtype, device = state.shapes.shape(spec), state.dtype(spec), state.settings.device
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    return lambda: values[total]


def gradient_views(gradient: Tensor, layout: LayerLayout) -> Sequence[Tensor]:
    """Return views of a layer's flat gradient, one for each parameter. They are made once and stored with it."""
    kept = vars(gradient)
    if "views" not in kept:
        kept["views"] = parameter_views(layout, gradient.data)  # views of the tensor would form a reference cycle
    return kept["views"]


def own_columns(state: State, op: Op) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts the gradient of a layer's output to the columns that the backward pass reads.

    A slice of a column-parallel layer, or of the logits, reads its own columns of a complete gradient. In all other
    cases, the function returns its argument.
    """
    gradient, saved = state.specs[op.inputs[1]], state.specs[op.inputs[3]]
    takes_own = any(node.takes_own for node in state.signatures[op.layer].nodes)
    if not takes_own or gradient.form.slices or not saved.form.slices:
        return lambda whole: whole
    ((index, piece),) = saved.form.slices
    return lambda whole: whole.chunk(saved.form.space.count(index), -1)[piece.bit_length() - 1]


def _back(state: State, op: Op, outputs: list[int]) -> Callable[[Accumulate, Waiting], None]:
    """Return a function of (accumulate, waiting) that computes the inputs' gradients, and stores them as `outputs`.

    The parameters' gradients are passed to `accumulate` (see `Accumulate`), which may add them to `waiting` to defer
    them. An input's gradient does not share memory with any other gradient, because other ops overwrite it.
    """
    (_, gradient, weight, saved, *carried), values = op.inputs, state.values
    own, passes = own_columns(state, op), state.passes[op.layer]

    def run(take: Accumulate, waiting: Waiting) -> None:
        kept: Any = values[saved]
        values[saved] = None
        gradients = [own(values[number]) for number in (gradient, *carried)]
        made = passes.backward(kept, gradients, state.weights_of(op.layer, weight), take)
        taken = {each.data_ptr() for each in (*gradients, *(each for _, each, _ in waiting))}
        for number, each in zip(outputs, made, strict=False):
            if each is not None:  # tokens have no gradient
                values[number] = each.clone() if each.data_ptr() in taken else each
                taken.add(each.data_ptr())

    return run


def _heads(state: State, layer: int, spec: Spec) -> Attend:
    """Return the attention primitive that follows a layer, restricted to the heads of a value."""
    share = fraction_held(spec.form)
    return state.model.attention_after(layer).heads_of(share.denominator // share.numerator)


def _mask(state: State, op: Op) -> Callable[[], Tensor | None]:
    """Prepare the dropout mask of some queries and keys. The whole mask is drawn as on one device, and then sliced."""
    queries, keys_values = (state.specs[number] for number in op.inputs[:2])
    whole, step = state.model.attention_after(op.layer), state.model.run(op.layer).attend
    assert step is not None
    shape = (queries.microbatches.bit_count() * state.shapes.rows, whole.heads, whole.tokens, whole.tokens)
    tokens, key_tokens = (torch.tensor(state.shapes.tokens(spec)) for spec in (queries, keys_values))
    count = _heads(state, op.layer, queries).heads
    pieces = queries.pieces("head")  # the pieces are adjacent, so the first one gives the first head
    first = whole.heads * ((pieces & -pieces).bit_length() - 1) // queries.form.space.count("head")
    like = torch.empty(0, dtype=state.exact, device=state.settings.device)

    def mask() -> Tensor | None:
        dropout = state.dropout(op)
        if dropout is None:
            return None
        drawn = replace(dropout, layer=step.block).mask(DropoutSite.ATTENTION, shape, like)
        return drawn[:, first : first + count, tokens[:, None].to(drawn.device), key_tokens.to(drawn.device)]

    return mask


def _rows(state: State, spec: Spec, which: int) -> Tensor:
    """Return the tokens (`which` 0) or the targets (1) at the positions of a value, (rows, tokens), on the device."""
    rows = torch.cat([state.batch[m][which] for m in bits(spec.microbatches)])
    if not spec.whole_sequences:
        rows = select_rows(rows.T, state.shapes.tokens(spec)).T.contiguous()
    return to_device(state.settings.device, rows)
