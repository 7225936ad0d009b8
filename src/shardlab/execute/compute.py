"""What each compute op of a tape does to the registers: prepared once, called at every step."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress

import torch
from torch import Tensor

from shardlab.execute import attention, layer_ops, slicing
from shardlab.execute.state import State
from shardlab.execute.updating import Instruction, direction, norm, update
from shardlab.models import tensors
from shardlab.models.tensors import loss_of
from shardlab.models.tensors.tokens import rows_of, sent_to
from shardlab.program import Op, OpKind, Spec
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
        number = state.value_of(factor)
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
    microbatches = spec.microbatches.bit_count()
    owned = [state.loss_owners[cell] == (state.rank, at) for cell in bits(spec.cells)]
    slices = len(owned) // microbatches  # of each sequence, which are summed one by one
    if spec.whole_sequences and owned == [mine for mine in owned[::slices] for _ in range(slices)]:
        owned, slices = owned[::slices], 1  # nobody else reports a part of one
    first = state.first_token(spec) if stats else 0

    def apart(whole: Tensor, dim: int = 0) -> list[Tensor]:
        """The pieces of something with rows in `dim` and tokens in the next dim."""
        if len(owned) == 1:
            return [whole]
        return [piece for row in whole.chunk(microbatches, dim) for piece in row.chunk(slices, dim + 1)]

    def report(losses: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        for loss, its in compress(zip(losses, targets, strict=True), owned):
            state.loss[0] += loss.detach()
            state.loss[1] += (its >= 0).sum()

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
        gathered = values[stats[0]].view(*whole.shape, -1, 3).movedim(2, 0)  # (slices, rows, T, 3)
        for output in op.outputs:
            scale = state.loss_scale.scale / state.tokens
            values[output] = tensors.loss_gradient(logits, gathered, whole, first, scale)
        parts, targets = apart(gathered, 1), apart(whole)
        report([tensors.combined_loss(part, its) for part, its in zip(parts, targets, strict=True)], targets)

    return run_on_slices if stats else run


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
    """Drop a value, and with an activation what its layer keeps of it."""
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
    OpKind.FORWARD: layer_ops.forward,
    OpKind.RECOMPUTE: layer_ops.forward,
    OpKind.ATTEND: attention.attend,
    OpKind.ATTEND_BACKWARD: attention.attend_backward,
    OpKind.LOSS_STATS: loss_stats,
    OpKind.LOSS: loss,
    OpKind.BACKWARD: layer_ops.backward,
    OpKind.BACKWARD_INPUT: layer_ops.backward_input,
    OpKind.BACKWARD_WEIGHT: layer_ops.backward_weight,
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
