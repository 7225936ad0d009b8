"""Limits of the backends: ops that the algebra allows but no backend can run, and the forward half of a program.

`why_not_runnable` finds ops that cannot be done with tensors of a device: on pieces of unequal size, or on several
slices of a layer at once. `forward_only` cuts a checked program down to the ops on which its losses depend; the sampler
and the evaluation run the result.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction

from shardlab.check.buffers import slice_counts
from shardlab.check.checked import Checked
from shardlab.common.errors import About, Refused
from shardlab.common.text import number_text
from shardlab.language import Kind, Op, OpKind, Program, Spec
from shardlab.language.ops import COMMUNICATION, COPIES, Combiner
from shardlab.language.rules.attention import split_cells
from shardlab.language.rules.collectives import slices_of_any_sequence
from shardlab.language.rules.kinds import ROW_KINDS
from shardlab.language.rules.layer_graph import Layer
from shardlab.language.rules.spec import Form, fraction_of_pieces
from shardlab.language.tape import Communication

FREE, WAIT, LOSS, LOAD_WEIGHT = OpKind.FREE, OpKind.WAIT, OpKind.LOSS, OpKind.LOAD_WEIGHT

OPT_STATE, GRAD_ACTIVATION, UNION = Kind.OPT_STATE, Kind.GRAD_ACTIVATION, Combiner.UNION
SCATTERING = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_TO_ALL})
"""Collectives that give each member a different part."""

FORWARDS = frozenset(kind for kind in OpKind if kind.row.keeps is Kind.SAVED)
LOCAL = frozenset({OpKind.SCALE, OpKind.CAST, OpKind.SLICE, OpKind.CONCATENATE})
STEPS = frozenset({OpKind.DIRECTION, OpKind.UPDATE})
CUT = FORWARDS | {OpKind.LOAD_BATCH, OpKind.LOSS, OpKind.LOSS_STATS}
REVISITED = LOCAL | STEPS | CUT
"""Compute ops that `why_not_runnable` examines, since backends cannot run all of them."""

MOST_PADDED = 1 << 20
"""Elements of padding that are accepted for any flat buffer: 4 MB of float32."""

Why = tuple[str, str]
"""(fact, remedy) of a refusal"""


def why_not_runnable(
    program: Program,
    specs: Sequence[dict[int, Spec]],
    communications: Sequence[Communication],
    places: Sequence[Sequence[int]],
) -> Refused | None:
    """Return the refusal of the first op that no backend can run; None if there is no such op.

    These are ops on unequal pieces, on several slices of a layer at once, and on values that are no tensors.

    Args:
        places: for each rank, the indices of its ops whose kinds are in `REVISITED`; other indices may be among them.
    """
    if why_not := _too_long(program, specs):
        return why_not
    tapes = program.tapes
    accepted: set[tuple[OpKind, Form]] = set()  # most communications repeat few ops and forms
    for _, _, members in communications:
        for rank, _, at in members:  # the sender of a message, or the first member of a collective that gives a value
            op = tapes[rank][at]
            if op[2]:
                break
        else:  # a barrier
            continue
        kind, spec = op[0], specs[rank][op[2][0]]
        form = spec[0]
        if (kind, form) in accepted and form.kind is not OPT_STATE:
            continue
        reason = None
        if form.kind is OPT_STATE and kind in COPIES:
            reason = _still_used(tapes[rank], at)
        elif form.kind is OPT_STATE:
            reason = "an optimizer state stays on the rank that loaded it", "load it where it is updated"
        elif form.kind is GRAD_ACTIVATION and form.layer == 0:
            reason = "the model's input is tokens, which have no gradient", f"do not communicate {spec}"
        elif kind.row.combines is UNION:
            reason = _cannot_gather([specs[rank][tapes[rank][at][2][0]] for rank, _, at in members])
        elif kind in SCATTERING and form.kind in ROW_KINDS:
            ops = [(specs[rank], tapes[rank][at]) for rank, _, at in members]
            reason = _cannot_scatter([s[op.inputs[0]] for s, op in ops], [s[op.outputs[0]] for s, op in ops])
        else:
            accepted.add((kind, form))
        if reason is not None:
            return _refusal(rank, at, op, reason)
    for rank, tape in enumerate(tapes):
        for at in places[rank]:
            op = tape[at]
            if op[0] in LOCAL and (reason := _cannot_cut([specs[rank][number] for number in op.inputs])):
                return _refusal(rank, at, op, reason)
        stepped = {specs[rank][tape[at].inputs[2]].form for at in places[rank] if tape[at].kind is OpKind.UPDATE}
        for at in places[rank]:
            op = tape[at]
            if op[0] is OpKind.DIRECTION and (state := specs[rank][op.inputs[1]]).form not in stepped:
                reason = f"no update steps {state} as it is", "update the optimizer state whose direction is taken"
                return _refusal(rank, at, op, reason)
    if not any(layer.cut for layer in program.sizes.signatures):  # nothing is sliced
        return None
    if why_not := _cut_buffers(program, specs):
        return why_not
    pieces = program.sizes.cuts(program.mesh)
    cuts = [math.prod(pieces[index] for index in layer.cut) for layer in program.sizes.signatures]
    for rank, tape in enumerate(tapes):
        for at in places[rank]:
            op = tape[at]
            if op[0] in CUT and (reason := _cannot_compute(op, specs[rank], cuts)):
                return _refusal(rank, at, op, reason)
    return None


def forward_only(checked: Checked) -> Program:
    """Cut a program down to the ops on which its losses depend: no gradients, updates, or values saved for them.

    Values are freed after their last use. All other ops keep their order, so no new deadlock arises. `check_forward`
    proves the result from its tapes, like any other program.
    """
    needed = _needed_ops(checked)
    tapes = [
        _freed_after_last_use(
            [_without_gradients(checked, rank, op) for index, op in enumerate(tape) if (rank, index) in needed]
        )
        for rank, tape in enumerate(checked.program.tapes)
    ]
    program = checked.program
    return Program(program.mesh, program.microbatches, program.sizes, tapes)


_OF_BUFFERS = frozenset({Kind.ACTIVATION, Kind.GRAD_ACTIVATION})


Place = tuple[int, int]
"""(rank, number of a value there or index of an op)"""


def _too_long(program: Program, specs: Sequence[dict[int, Spec]]) -> Refused | None:
    """Return the refusal of a layer whose flat buffer would be mostly padding.

    A flat buffer is padded so that every number of slices in use divides it. A padded length is accepted if it is at
    most `MOST_PADDED`, or at most twice the layer's length, or if the largest of these numbers alone requires it.
    """
    for layer, numbers in slice_counts(specs).items():
        length = 16 * math.lcm(*numbers)
        if length > max(16 * max(numbers), MOST_PADDED) and length > 2 * program.sizes.weights[layer]:
            fault = (
                f"layer {layer} is cut into {_listed(numbers)} slices, and only {number_text(length)} elements or a "
                "multiple divide into all of these"
            )
            remedy = "cut by numbers of which one divides the other"
            return Refused("not runnable", About(f"weights[{layer}]", layer), fault, remedy)
    return None


def _listed(numbers: Iterable[int]) -> str:
    """Return text such as `2, 3 and 5`."""
    *others, last = sorted(numbers)
    return f"{', '.join(map(str, others))} and {last}"


def _cut_buffers(program: Program, specs: Sequence[dict[int, Spec]]) -> Refused | None:
    """Return the refusal of a slice of sequences in an experts' buffer: a buffer mixes tokens of all slices."""
    layers = program.sizes.signatures
    buffers = {
        index for index, layer in enumerate(layers, 1) if _indices_made(layer, layer.outputs[0].tensor) & {"expert"}
    }
    if not buffers or program.sizes.space(program.mesh, 1).sequence == 1:
        return None
    for rank, tape in enumerate(program.tapes):
        for number, spec in specs[rank].items():
            if spec.layer in buffers and spec.kind in _OF_BUFFERS and not spec.whole_sequences:
                index, op = next((index, op) for index, op in enumerate(tape) if number in op.outputs)
                fault = f"this would be {spec} in experts' buffers, whose places have tokens of any part of a sequence"
                return _refusal(rank, index, op, (fault, "cut sequences before tokens are dispatched to experts"))
    return None


def _indices_made(layer: Layer, tensor: str) -> set[str]:
    """Return the indices of a tensor that a node of the layer makes (empty: none makes it)."""
    return {index for node in layer.nodes for index in node.makes.get(tensor, "").split()}


def _refusal(rank: int, index: int, op: Op, reason: Why) -> Refused:
    return Refused("not runnable", op.about, *reason).at(rank, index)


def _still_used(tape: Sequence[Op], index: int) -> Why | None:
    """Return why an optimizer state cannot be copied here: a later op still reads the original."""
    (number,) = tape[index].inputs
    reader = next((op for op in tape[index + 1 :] if number in op.inputs and op.kind is not OpKind.FREE), None)
    if reader is None:
        return None
    return f"an optimizer state is in one place at a time, but {reader} reads it where it was", "use the copy alone"


def _cannot_cut(specs: Sequence[Spec]) -> Why | None:
    """Return why values cannot be cut, scaled or concatenated as tensors on one rank; None if they can."""
    first = specs[0]
    if first.kind is GRAD_ACTIVATION and first.layer == 0:
        return "the model's input is tokens, which have no gradient", f"do not cut, scale or concatenate {first}"
    return _differs_in_two_dims(specs)


def _cannot_gather(specs: Sequence[Spec]) -> Why | None:
    """Return why the members' values in a gather do not form one tensor; None if they do."""
    shares = [_share(spec) for spec in specs]
    if any(share != shares[0] for share in shares):
        return f"the members give {', '.join(map(str, shares))} of the whole", "gather equal pieces"
    return _differs_in_two_dims(specs)


def _cannot_scatter(inputs: Sequence[Spec], outputs: Sequence[Spec]) -> Why | None:
    """Return why a collective cannot give each member a part; None if it can."""
    for verb, specs, remedy in (
        ("give", inputs, "give equal pieces"),
        ("receive", outputs, "put the value together from equal pieces, since it is dealt in these"),
    ):
        shares = [_share(spec) for spec in specs]
        if any(share != shares[0] for share in shares):
            return f"the members {verb} {', '.join(map(str, shares))} of the whole", remedy
    uneven = next((spec for spec in outputs if not _even(spec)), None)
    if uneven is None:
        return None
    return f"{uneven} has other slices of some microbatches than of others", "deal the same slices of all microbatches"


def _differs_in_two_dims(specs: Sequence[Spec]) -> Why | None:
    """Return why pieces that differ in microbatches and in slices of sequences form no tensor; None if they do not."""
    first = specs[0]
    if first.kind not in ROW_KINDS or all(spec.microbatches == first.microbatches for spec in specs):
        return None
    if len({slices_of_any_sequence(spec) for spec in specs}) > 1:
        fault = "these are of other microbatches and of other slices of the sequence"
        return fault, "gather those of one kind, then those of the other"
    return None


def _share(spec: Spec) -> Fraction:
    """Return the fraction of the whole that a value holds.

    It is a fraction of the parameters; or that of the batch's cells, times that of each cut index, such as heads.
    """
    if spec.kind in ROW_KINDS:
        return Fraction(spec.cells.bit_count(), spec.form.space.cells) * fraction_of_pieces(spec.form)
    return Fraction(spec.holds.pieces, spec.holds.of)


def _cannot_compute(op: Op, specs: dict[int, Spec], cuts: Sequence[int]) -> Why | None:
    """Return why a device cannot compute an op that the rules allow; None if it can.

    Args:
        cuts: for each layer, the number of slices into which the mesh cuts it.
    """
    if op[0] in FORWARDS:
        cut, holds = cuts[op[1]], specs[op[2][1]][0].holds
        if cut > 1 and holds.of != cut:
            holds = holds.simplified()
        if cut > 1 and (holds.of != cut or holds.pieces != 1):
            fault = f"layer {op.layer} is cut into {cut} slices and this computes with slices {holds} of it at once"
            return fault, "compute with one slice on each rank"
    # A value computed from loaded batches holds the same slices of each microbatch if these batches do.
    elif op[0] is OpKind.LOAD_BATCH:
        batch = specs[op.outputs[0]]
        if not _even(batch):
            return f"{batch} has other slices of some microbatches than of others", "load and compute them apart"
    else:
        logits = specs[op.inputs[0]]
        if any(pieces.bit_count() > 1 for _, pieces in logits.form.slices):
            return f"{logits} has several slices of the logits, but not all", "compute the loss of one slice, or of all"
    return None


def _even(spec: Spec) -> bool:
    """Return whether a value holds the same slices of each microbatch."""
    return split_cells(spec.cells, spec.form.space.sequence)[1] >= 0


def _needed_ops(checked: Checked) -> set[Place]:
    """Return the ops on which the losses depend. A communication depends on the parts and waits of all its members."""
    tapes = checked.program.tapes
    ops = [(rank, index, op) for rank, tape in enumerate(tapes) for index, op in enumerate(tape)]
    maker = {(rank, number): index for rank, index, op in ops for number in op.outputs}
    wait = {(rank, op.handle): index for rank, index, op in ops if op.kind is WAIT}
    stack = [(rank, index) for rank, index, op in ops if op.kind is LOSS]
    needed: set[Place] = set()
    while stack:
        place = stack.pop()
        if place in needed:
            continue
        needed.add(place)
        rank, index = place
        op = tapes[rank][index]
        stack += [(rank, maker[rank, number]) for number in op.inputs]
        if op.kind in COMMUNICATION:
            stack.append((rank, wait[rank, op.handle]))
            communication = checked.communications[checked.communication_of[rank][op.handle]]
            stack += [(member.rank, member.op) for member in communication.participants]
    return needed


def _without_gradients(checked: Checked, rank: int, op: Op) -> Op:
    """Return an op without the inputs and outputs that only training needs.

    A loss makes no gradient and a forward pass saves no value. Offsets are dropped, since they belong to other
    lifetimes.
    """
    op = op._replace(offset=-1)
    if op.kind is LOSS:
        return op._replace(outputs=())
    return op._replace(outputs=tuple(n for n in op.outputs if checked.specs[rank][n].kind is not Kind.SAVED))


def _freed_after_last_use(ops: list[Op]) -> list[Op]:
    """Insert a FREE after the last use of every value except the loaded weights."""
    kept_values = {number for op in ops if op.kind is LOAD_WEIGHT for number in op.outputs}
    waits = {op.handle: index for index, op in enumerate(ops) if op.kind is WAIT}
    last: dict[int, int] = {}
    for index, op in enumerate(ops):
        until = waits.get(op.handle, index)
        for number in (*op.inputs, *op.outputs):
            last[number] = max(last.get(number, index), until)
    ends: dict[int, list[int]] = defaultdict(list)
    for number, index in last.items():
        if number not in kept_values:
            ends[index].append(number)
    return list(_with_frees(ops, ends))


def _with_frees(ops: list[Op], ends: dict[int, list[int]]) -> Iterator[Op]:
    for index, op in enumerate(ops):
        yield op
        for number in ends.get(index, ()):
            yield Op(FREE, -1, (number,))
