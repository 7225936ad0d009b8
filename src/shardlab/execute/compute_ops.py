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

DeferredGradients = list[tuple[AddGradients, Tensor, Tensor]]
"""Gradients of parameters that the first half of a split backward pass leaves to the second half: (function that adds
the gradient, gradient of the result, input)."""


def forward(state: State, index: int, op: Op) -> Instruction:
    """Run a layer. If the op has a saved value as an output, store in it the tensors that the backward pass reads.

    A RECOMPUTE has only this output.
    """
    (x, weight, *carried_values), values, passes = op.inputs, state.values, state.passes[op.layer]
    saves = state.specs[op.outputs[-1]].kind is Kind.SAVED
    outputs, saved_value = op.outputs[: len(op.outputs) - saves], op.outputs[-1]
    share, run_of_layer = state.share(op), state.model.run(op.layer)
    factor = state.analysis.gradient_factor.get(saved_value) if run_of_layer.affine else None
    # The second half of a split backward pass reads the input, and the memory model counts it.
    keeps_input = index in state.analysis.halved and run_of_layer.keeps_input
    drops_input = index in state.analysis.last_reads and not keeps_input

    def run() -> None:
        inputs, weights = [values[number] for number in (x, *carried_values)], state.weights_of(op.layer, weight)
        scaled_share = share if factor is None else state.scaled(share, factor)
        results, saved_tensors = passes.forward(inputs, weights, scaled_share, state.dropout(op), keeps=saves)
        for number, result in zip(outputs, results, strict=op.kind is OpKind.FORWARD):
            values[number] = result
        if saves:
            values[saved_value] = saved_tensors
            if drops_input:
                values[x] = None  # the saved tensors include what is still needed

    return run


def backward(state: State, index: int, op: Op) -> Instruction:
    """Run the whole backward pass. If the tape only adds the weight gradient to an older one, accumulate it there."""
    grad_weight, *outputs = op.outputs
    layout, make_buffer = state.shapes.layout_of_weight(op.layer), gradient_buffer(state, index, op)
    run_backward = _prepare_backward(state, op, outputs)

    def run() -> None:
        buffer = make_buffer()
        totals = gradient_views(buffer, layout)
        run_backward(lambda add, gradient, read: add(totals, gradient, read), [])
        state.values[grad_weight] = buffer

    return run


def backward_input(state: State, index: int, op: Op) -> Instruction:
    """Run the first half of a backward pass: the inputs' gradients. The parameters' gradients are deferred."""
    *outputs, half = op.outputs
    run_backward = _prepare_backward(state, op, outputs)

    def run() -> None:
        deferred: DeferredGradients = []
        run_backward(lambda add, gradient, read: deferred.append((add, gradient, read)), deferred)
        state.values[half] = deferred

    return run


def backward_weight(state: State, index: int, op: Op) -> Instruction:
    """Run the second half of a backward pass: the deferred gradients of the parameters."""
    half, grad_weight, values = op.inputs[2], op.outputs[0], state.values
    layout, make_buffer = state.shapes.layout_of_weight(op.layer), gradient_buffer(state, index, op)

    def run() -> None:
        deferred: DeferredGradients = values[half]
        values[half] = None
        buffer = make_buffer()
        totals = gradient_views(buffer, layout)
        while deferred:
            add, gradient, read = deferred.pop(0)
            add(totals, gradient, read)
        values[grad_weight] = buffer

    return run


def attend(state: State, index: int, op: Op) -> Instruction:
    """Let queries attend to one part of the keys and values."""
    (queries, keys_values), (output,), values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        values[output] = attention.attend(part, values[queries], values[keys_values], tokens, key_tokens, mask())

    return run


def attend_backward(state: State, index: int, op: Op) -> Instruction:
    """Compute the gradient of one part of the keys and values, and this part's term of the queries' gradient."""
    (queries, keys_values, attention_output, gradient), outputs, values = op.inputs, op.outputs, state.values
    part, mask = _heads(state, op.layer, state.specs[queries]), _mask(state, op)
    tokens, key_tokens = (state.shapes.tokens(state.specs[number]) for number in (queries, keys_values))

    def run() -> None:
        q, kv, mixed, grad = (values[number] for number in (queries, keys_values, attention_output, gradient))
        gradients = attention.attend_backward(part, q, kv, mixed, grad, tokens, key_tokens, mask())
        values[outputs[0]], values[outputs[1]] = gradients

    return run


def merge(state: State, op: Op) -> Instruction:
    """Merge the outputs of attention for two parts of the keys and values."""
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    part = _heads(state, op.layer - 1, state.specs[a])
    return lambda: values.__setitem__(output, attention.merge(part, values[a], values[b]))


def load_state(state: State, index: int, op: Op) -> Instruction:
    """Set the op's output to weights, or to an optimizer state, that this rank keeps from step to step."""
    assert op.holds is not None
    table = state.kept if op.kind is OpKind.LOAD_WEIGHT else state.opt_states
    tensors, (output,), values = table[op.layer, op.holds], op.outputs, state.values
    return lambda: values.__setitem__(output, tensors)


def scale(state: State, index: int, op: Op) -> Instruction:
    """Multiply a gradient by a factor (see `Factor`), in place if no other op reads the gradient."""
    (operand,), (output,), values, factor = op.inputs, op.outputs, state.values, op.factor
    in_place = index in state.analysis.in_place.first_input
    assert factor is not None

    def run() -> None:
        number = state.value_of(factor)
        values[output] = values[operand].mul_(number) if in_place else values[operand] * number

    return run


def cast(state: State, index: int, op: Op) -> Instruction:
    """Cast a value to another dtype. The result has new memory or, if it is a weight with a buffer, this buffer."""
    (operand,), (output,), values = op.inputs, op.outputs, state.values
    dtype, slot = state.dtype(state.specs[output]), state.analysis.slot.get(output)

    def run() -> None:
        tensor: Tensor = values[operand]
        values[output] = (
            tensor.to(dtype, copy=True) if slot is None else state.fill_buffer(slot, len(tensor)).copy_(tensor)
        )

    return run


def zero_gradient(state: State, index: int, op: Op) -> Instruction:
    (output,), values = op.outputs, state.values
    return lambda: values.__setitem__(output, state.memory_for(output).zero_())


def load_batch(state: State, index: int, op: Op) -> Instruction:
    """Load the tokens of some microbatches, concatenated."""
    assert op.holds is not None
    output, values = op.outputs[0], state.values

    def run() -> None:
        values[output] = _rows(state, state.specs[output], 0)

    return run


def loss_stats(state: State, index: int, op: Op) -> Instruction:
    """Reduce this rank's slice of the logits to the statistics that the loss needs."""
    (x,), (output,), values = op.inputs, op.outputs, state.values
    first = state.first_token(state.specs[x])

    def run() -> None:
        values[output] = tensors.loss_stats(values[x], _rows(state, state.specs[x], 1), first)

    return run


def loss(state: State, index: int, op: Op) -> Instruction:
    """Add the cross-entropy of the tokens that this op reports to `State.loss`, and compute the logits' gradient.

    The gradient is that of the sum over tokens, divided by the step's number of tokens and, in float16, multiplied by
    the loss scale. Sums over microbatches and ranks are therefore gradients of the mean. An op without an output
    computes no gradient.
    """
    (x, *stats), values = op.inputs, state.values
    spec = state.specs[x]
    microbatches = spec.microbatches.bit_count()
    ownership = [state.loss_owners[cell] == (state.rank, index) for cell in bits(spec.cells)]
    slices = len(ownership) // microbatches  # slices of each sequence, whose losses are summed separately
    if spec.whole_sequences and ownership == [is_own for is_own in ownership[::slices] for _ in range(slices)]:
        ownership, slices = ownership[::slices], 1  # no other rank reports any part of the batch
    first = state.first_token(spec) if stats else 0

    def split(whole: Tensor, dim: int = 0) -> list[Tensor]:
        """Cut a tensor (rows in `dim`, tokens in the next dim) into the parts whose losses are summed separately."""
        if len(ownership) == 1:
            return [whole]
        return [piece for row in whole.chunk(microbatches, dim) for piece in row.chunk(slices, dim + 1)]

    def report(losses: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for part_loss, part_targets in compress(zip(losses, targets, strict=True), ownership):
            state.loss[0] += part_loss.detach()
            state.loss[1] += (part_targets >= 0).sum()

    def run() -> None:
        logits: Tensor = values[x]
        whole, log_probs = _rows(state, spec, 1), log_probabilities(logits)
        targets = split(whole)
        losses = [loss_of(part, part_targets) for part, part_targets in zip(split(log_probs), targets, strict=True)]
        for output in op.outputs:
            scale = torch.ones_like(losses[0]) / (state.tokens / state.loss_scale.scale)
            values[output] = cross_entropy_backward(log_probs, whole, scale, logits.dtype)
        report(losses, targets)

    def run_on_slices() -> None:
        logits: Tensor = values[x]
        whole = _rows(state, spec, 1)
        rank_stats = values[stats[0]].view(*whole.shape, -1, 3).movedim(2, 0)  # (slices, rows, T, 3)
        for output in op.outputs:
            scale = state.loss_scale.scale / state.tokens
            values[output] = tensors.loss_gradient(logits, rank_stats, whole, first, scale)
        parts, targets = split(rank_stats, 1), split(whole)
        report(
            [tensors.combine_loss(part, part_targets) for part, part_targets in zip(parts, targets, strict=True)],
            targets,
        )

    return run_on_slices if stats else run


def add(state: State, index: int, op: Op) -> Instruction:
    """Add two gradients; in place if no other op reads the first one."""
    term = state.specs[op.inputs[0]].form.term
    if term is not None and term.merged:
        return merge(state, op)
    (a, b), (output,), values = op.inputs, op.outputs, state.values
    fused, in_place = index in state.analysis.in_place.fused, index in state.analysis.in_place.first_input

    def run() -> None:
        if fused:  # BACKWARD has already added its gradient to the older one, so both values are one buffer
            values[output] = values[a]
        else:
            values[output] = values[a].add_(values[b]) if in_place else values[a] + values[b]

    return run


def free(state: State, index: int, op: Op) -> Instruction:
    """Drop a value. If it is the input of a layer, also drop the tensors that the layer has saved for its backward."""
    number, values = op.inputs[0], state.values
    saved_values, slot = state.analysis.saved_of[number], state.analysis.empties.get(index)
    kept_weight = state.analysis.freed_weights.get(index)

    def run() -> None:
        values[number] = None
        if slot is not None:
            state.empty_buffer(slot)
        if kept_weight is not None:
            state.give_back(kept_weight)
        for saved_value in saved_values:
            values[saved_value] = None

    return run


COMPUTE: dict[OpKind, Callable[[State, int, Op], Instruction]] = {
    OpKind.LOAD_WEIGHT: load_state,
    OpKind.LOAD_OPT_STATE: load_state,
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


def gradient_buffer(state: State, index: int, op: Op) -> Callable[[], Tensor]:
    """Prepare the buffer of a layer's weight gradient: zeros, or the older gradient to which it is added."""
    total = state.analysis.in_place.accumulates.get(index)
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
    attributes = vars(gradient)
    if "views" not in attributes:
        attributes["views"] = parameter_views(layout, gradient.data)  # views of the tensor would form a reference cycle
    return attributes["views"]


def own_columns(state: State, op: Op) -> Callable[[Tensor], Tensor]:
    """Return a function that cuts the gradient of a layer's output to the columns that the backward pass reads.

    A slice of a column-parallel layer, or of the logits, reads its own columns of a complete gradient. In all other
    cases, the function returns its argument.
    """
    gradient, saved_spec = state.specs[op.inputs[1]], state.specs[op.inputs[3]]
    takes_own = any(node.takes_own for node in state.signatures[op.layer].nodes)
    if not takes_own or gradient.form.slices or not saved_spec.form.slices:
        return lambda whole: whole
    ((index, piece),) = saved_spec.form.slices
    return lambda whole: whole.chunk(saved_spec.form.space.count(index), -1)[piece.bit_length() - 1]


def _prepare_backward(state: State, op: Op, outputs: list[int]) -> Callable[[Accumulate, DeferredGradients], None]:
    """Return a function of (accumulate, deferred) that computes the inputs' gradients, and stores them as `outputs`.

    The parameters' gradients are passed to `accumulate` (see `Accumulate`), which may add them to `deferred` to defer
    them. An input's gradient does not share memory with any other gradient, because other ops overwrite it.
    """
    (_, gradient, weight, saved_value, *carried_gradients), values = op.inputs, state.values
    cut_columns, passes = own_columns(state, op), state.passes[op.layer]

    def run(accumulate: Accumulate, deferred: DeferredGradients) -> None:
        saved_tensors: Any = values[saved_value]
        values[saved_value] = None
        gradients = [cut_columns(values[number]) for number in (gradient, *carried_gradients)]
        results = passes.backward(saved_tensors, gradients, state.weights_of(op.layer, weight), accumulate)
        addresses = {tensor.data_ptr() for tensor in (*gradients, *(tensor for _, tensor, _ in deferred))}
        for number, tensor in zip(outputs, results, strict=False):
            if tensor is not None:  # tokens have no gradient
                values[number] = tensor.clone() if tensor.data_ptr() in addresses else tensor
                addresses.add(tensor.data_ptr())

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
        whole_mask = replace(dropout, layer=step.block).mask(DropoutSite.ATTENTION, shape, like)
        return whole_mask[
            :, first : first + count, tokens[:, None].to(whole_mask.device), key_tokens.to(whole_mask.device)
        ]

    return mask


def _rows(state: State, spec: Spec, index: int) -> Tensor:
    """Return the tokens (`index` 0) or the targets (1) at the positions of a value, (rows, tokens), on the device."""
    rows = torch.cat([state.batch[m][index] for m in bits(spec.microbatches)])
    if not spec.whole_sequences:
        rows = select_rows(rows.T, state.shapes.tokens(spec)).T.contiguous()
    return to_device(state.settings.device, rows)
