"""What no torch.distributed backend can carry out, however right the program is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardlab.check.checked import Meeting
from shardlab.program import Kind, OpKind, Program, Spec
from shardlab.rules.kind import ROW_KINDS


def why_not_runnable(program: Program, specs: Sequence[dict[int, Spec]], meetings: Sequence[Meeting]) -> str | None:
    """The first op that has no tensors, or uneven ones; None if there is none."""
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
    return None


def _share(spec: Spec) -> Fraction:
    """How much of the whole a value holds, of parameters or of the batch."""
    if spec.kind in ROW_KINDS:
        return Fraction(spec.cells.bit_count(), spec.form.space.cells)
    return Fraction(spec.holds.pieces, spec.holds.of)
