"""What no torch.distributed backend can carry out, however right the program is."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from shardlab.check.checked import Meeting
from shardlab.program import Kind, OpKind, Program, Spec


def why_not_runnable(program: Program, specs: Sequence[dict[int, Spec]], meetings: Sequence[Meeting]) -> str | None:
    """The first communication that has no tensors, or uneven ones; None if there is none."""
    for meeting in meetings:
        rank, _, at = meeting.members[0]  # of a message the sender
        op = program.tapes[rank][at]
        spec = specs[rank][op.inputs[0]]
        why = None
        if spec.kind is Kind.OPT_STATE:
            why = "an optimizer state stays where it was loaded; load it where it is updated"
        elif spec.kind is Kind.GRAD_ACTIVATION and spec.layer == 0:
            why = f"the model's input is tokens, which have no gradient; do not communicate {spec}"
        elif op.kind is OpKind.ALL_GATHER:
            given = [specs[m.rank][program.tapes[m.rank][m.op].inputs[0]].holds for m in meeting.members]
            if any(holds.pieces * given[0].of != given[0].pieces * holds.of for holds in given):
                shares = ", ".join(str(Fraction(holds.pieces, holds.of)) for holds in given)
                why = f"the members give {shares} of the whole; only equal pieces are gathered"
        if why is not None:
            return f"rank {rank}, op {at} {op}: {why}."
    return None
