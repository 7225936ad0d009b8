"""Receives are posted before what they bring is needed, so that messages travel while their receiver computes."""

from __future__ import annotations

from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import Tapes, reordered
from shardlab.program import OpKind


def early_receives(checked: Checked, ahead: int) -> Tapes:
    """Post each receive so many uses of received values ahead."""
    return reordered(checked.program.tapes, checked.specs, partial(_wish, ahead))


def _wish(ahead: int, order: Ordering) -> None:
    needs = order.needs
    received = [at for at, op in enumerate(needs.tape) if op.kind is OpKind.RECV and op.batch < 0]
    uses = [min(needs.readers[needs.tape[at].outputs[0]], default=at) for at in received]
    for number, at in enumerate(received):
        order.start_before(at, uses[number - ahead] if number >= ahead else received[0])
