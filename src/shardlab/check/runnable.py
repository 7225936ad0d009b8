"""What no torch.distributed backend can carry out, however right the program is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardlab.check.checked import Meeting
from shardlab.program import Kind, OpKind, Program, Spec
from shardlab.program.tape import COMMUNICATION


def why_not_runnable(program: Program, specs: Sequence[dict[int, Spec]], meetings: Sequence[Meeting]) -> str | None:
    """The first communication that has no tensors, or uneven ones; None if there is none."""
    for rank, tape in enumerate(program.tapes):
        for at, op in enumerate(tape):
            if op.kind not in COMMUNICATION:
                continue
            spec = specs[rank][(op.inputs or op.outputs)[0]]
            where = f"rank {rank}, op {at} {op}"
            if spec.kind is Kind.OPT_STATE:
                return (
                    f"{where}: an optimizer state stays where it was loaded; load it on the rank that updates with it."
                )
            if spec.kind is Kind.GRAD_ACTIVATION and spec.layer == 0:
                return f"{where}: the model's input is tokens, which have no gradient; do not communicate {spec}."
    for meeting in meetings:
        rank, _, at = meeting.members[0]
        op = program.tapes[rank][at]
        if op.kind is OpKind.ALL_GATHER:
            given = [specs[m.rank][program.tapes[m.rank][m.op].inputs[0]].holds for m in meeting.members]
            if len({Fraction(holds.pieces, holds.of) for holds in given}) > 1:
                shares = ", ".join(f"{holds.pieces}/{holds.of}" for holds in given)
                return f"rank {rank}, op {at} {op}: the members give {shares}; only equal pieces are gathered."
    return None
