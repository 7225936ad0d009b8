"""What no torch.distributed backend can carry out, however right the program is."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from fractions import Fraction

from shardlab.check.checked import Meeting
from shardlab.program import Holds, Kind, Op, OpKind, Program, Spec
from shardlab.rules.kind import ROW_KINDS
from shardlab.rules.pieces import common


def why_not_runnable(program: Program, specs: Sequence[dict[int, Spec]], meetings: Sequence[Meeting]) -> str | None:
    """The first op that has no tensors, or uneven ones, or reads what is no more; None if there is none."""
    for meeting in meetings:
        # of a message the sender, of a collective the first that gives a value
        givers = ((rank, at) for rank, _, at in meeting.members if program.tapes[rank][at].inputs)
        rank, at = next(givers, (-1, -1))
        if rank < 0:  # a barrier
            continue
        op = program.tapes[rank][at]
        spec = specs[rank][op.inputs[0]]
        why = None
        if spec.kind is Kind.OPT_STATE:
            why = "an optimizer state stays where it was loaded; load it where it is updated"
        elif spec.kind is Kind.GRAD_ACTIVATION and spec.layer == 0:
            why = f"the model's input is tokens, which have no gradient; do not communicate {spec}"
        elif op.kind in (OpKind.ALL_GATHER, OpKind.GATHER):
            given = [_share(specs[m.rank][program.tapes[m.rank][m.op].inputs[0]]) for m in meeting.members]
            if any(share != given[0] for share in given):
                shares = ", ".join(map(str, given))
                why = f"the members give {shares} of the whole; only equal pieces are gathered"
        if why is not None:
            return f"rank {rank}, op {at} {op}: {why}."
    return next(
        (why for rank, tape in enumerate(program.tapes) if (why := _overwritten(rank, tape, specs[rank]))), None
    )


def _share(spec: Spec) -> Fraction:
    """How much of the whole a value holds, of parameters or of the batch."""
    if spec.kind in ROW_KINDS:
        return Fraction(spec.cells.bit_count(), spec.form.space.cells)
    return Fraction(spec.holds.pieces, spec.holds.of)


def _overwritten(rank: int, tape: Sequence[Op], specs: dict[int, Spec]) -> str | None:
    """The first read of a loaded weight that is no more: an update writes over it, whatever copy it is given."""
    loads = [op for op in tape if op[0] is OpKind.LOAD_WEIGHT]
    own = {op.outputs[0] for op in loads}
    if len({op.layer for op in loads}) == len(loads) and all(op[2][1] in own for op in tape if op[0] is OpKind.UPDATE):
        return None  # each layer's one loaded weight is what its update is given, and so it ends there
    loaded: dict[int, list[int]] = defaultdict(list)
    written: dict[int, int] = {}  # by which update
    reading: dict[int, int] = {}  # handle to what its communication reads
    for at, op in enumerate(tape):
        kind = op[0]
        if kind is OpKind.LOAD_WEIGHT:
            loaded[op.layer].append(op.outputs[0])
        elif kind is OpKind.WAIT:
            reading.pop(op.handle, None)
        elif kind is not OpKind.FREE:
            if op.handle >= 0 and op.inputs:
                reading[op.handle] = op.inputs[0]
            if kind is OpKind.UPDATE and loaded[op.layer] != [op.inputs[1]]:
                slices = specs[op.inputs[2]].holds
                others = [n for n in loaded[op.layer] if n != op.inputs[1]]
                written |= {n: at for n in others if _overlap(specs[n].holds, slices)}
            late = [n for n in (*op.inputs, *reading.values()) if n in written] if written else []
            if late:
                update = written[late[0]]
                return (
                    f"rank {rank}, op {at} {op}: {specs[late[0]]} is read here, but op {update} {tape[update]} was "
                    "given another copy of it and has written over it; read it before that, or update it itself."
                )
    return None


def _overlap(a: Holds, b: Holds) -> bool:
    mine, theirs = common(a, b)
    return mine.mask & theirs.mask != 0
