"""The pass `fuse-steps`: the first gathers of the next step run at the end of this step, beside its last updates.

The pass needs no new op, since a step loads the values that the previous step leaves. On the new tape, a gathered
weight is loaded at the start, beside the rank's slice of it, and gathered again from the updated slice before the step
ends. The check of one tape covers any number of steps: for every slice that a step loads, it must leave the slice after
one more update. Before the first step, and before the first step after loading a checkpoint, these weights are
gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from shardlab.check import Checked
from shardlab.check.buffers import batches_of
from shardlab.check.checked import Dependences
from shardlab.check.in_place import KeptWeights
from shardlab.language import Op, OpKind, Spec
from shardlab.simulate.passes.reorder import CannotApply, Ordering, Tapes

WAIT, UPDATE = OpKind.WAIT, OpKind.UPDATE
LOAD_WEIGHT, ALL_GATHER = OpKind.LOAD_WEIGHT, OpKind.ALL_GATHER


def fuse_steps(checked: Checked, count: int) -> Tapes:
    """Move each rank's first `count` gathers into the previous step, beside the last `count` updates of other slices.

    Raises:
        CannotApply: if no step begins with gathers of weights that are kept on the device.
    """
    gathers = _common_gathers(checked, count)
    if not gathers:
        raise CannotApply("no step begins with a gather of weights that are kept on the device")
    tapes: Tapes = []
    for rank, tape in enumerate(checked.program.tapes):
        rank_gathers = {index for other, index in gathers if other == rank}
        fused, specs = _fused(tape, checked.specs[rank], rank_gathers)
        order = Ordering(Dependences(fused, rank, specs))
        _wish({tape[index].handle for index in rank_gathers}, count, order)
        tapes.append(order.tape())
    return tapes


def _common_gathers(checked: Checked, count: int) -> set[tuple[int, int]]:
    """Return the gathers that can run in the previous step on all their members, as (rank, index)."""
    able = {(rank, index) for rank in range(checked.program.ranks) for index in _first(checked, rank, count)}
    members_of_each = [
        {(member.rank, member.op) for member in communication.participants} for communication in checked.communications
    ]
    return {place for meeting in members_of_each if meeting <= able for place in meeting}


def _first(checked: Checked, rank: int, count: int) -> list[int]:
    """Return a rank's first gathers of weights that it loads, one for each layer. A batch counts as one gather."""
    tape, specs = checked.program.tapes[rank], checked.specs[rank]
    weights = KeptWeights(tape, specs)
    final_slices = {key for number, key in weights.final.items() if not specs[number].form.place}
    first_gathers: dict[tuple[int, object], int] = {}
    for index, op in enumerate(tape):
        if op.kind is ALL_GATHER and weights.loads.get(op.inputs[0]) in final_slices:
            form = specs[op.outputs[0]].form
            if (form.layer, form.holds) not in weights.place_of and not form.dtype:
                first_gathers.setdefault((form.layer, form.holds), index)
    batches = batches_of(tape)
    batches_in_order = dict.fromkeys(tuple(batches.get(tape[index].batch, [index])) for index in first_gathers.values())
    return [index for batch in [*batches_in_order][:count] if {*batch} <= {*first_gathers.values()} for index in batch]


def _fused(tape: Sequence[Op], specs: Mapping[int, Spec], gathers: Set[int]) -> tuple[list[Op], Mapping[int, Spec]]:
    """Return the new tape and specs of a rank: each chosen gather comes right after the update of the gathered slice.

    All chosen gathers are awaited at the end of the tape.
    """
    weights = KeptWeights(tape, specs)
    new = {weights.final[number]: number for number in weights.final}
    waits = {op.handle: index for index, op in enumerate(tape) if op.kind is WAIT}
    ready = {number: waits.get(op.handle, index) for index, op in enumerate(tape) for number in op.outputs}
    batches, specs = batches_of(tape), dict(specs)
    updated = {index: new[weights.loads[tape[index].inputs[0]]] for index in gathers}
    puts: dict[int, list[Op]] = defaultdict(list)  # index of an op -> new ops after it
    ends: list[Op] = []
    for values, index in enumerate(sorted(gathers), max(specs, default=-1) + 1):
        op = tape[index]
        (piece,), (whole,) = op.inputs, op.outputs
        puts[ready[piece]].append(Op(LOAD_WEIGHT, op.layer, (), (whole,), holds=specs[whole].holds))
        start = max(ready[updated[other]] for other in batches.get(op.batch, [index]))
        puts[start].append(op._replace(inputs=(updated[index],), outputs=(values,)))
        ends.append(tape[waits[op.handle]])
        specs[values] = specs[whole]._replace(form=specs[whole].form.but(step=1))
    left_out = gathers | {waits[tape[index].handle] for index in gathers}
    new_tape = [
        new_op
        for index, op in enumerate(tape)
        for new_op in (*([] if index in left_out else [op]), *puts.get(index, []))
    ]
    return new_tape + ends, specs


def _wish(handles: Set[int], count: int, order: Ordering) -> None:
    """Start the gathers with these handles as soon as possible, before the last updates of other slices."""
    tape, needs, batches = order.needs.tape, order.needs, batches_of(order.needs.tape)
    gathers = [index for index, op in enumerate(tape) if op.kind is ALL_GATHER and op.handle in handles]
    sources = {tape[index].inputs[0] for index in gathers}
    others: list[int] = []
    for index, op in enumerate(tape):
        if op.kind is UPDATE and not sources & {*op.outputs}:
            others.append(index)
        elif op.kind is UPDATE:
            order.start_at_once(index)
    for index in gathers:
        order.start_at_once(*batches.get(tape[index].batch, [index]))
    for index in others[-count:] if gathers else ():
        order.end_before(index, min(map(needs.end_of, gathers)))
