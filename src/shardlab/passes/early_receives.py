"""Receives are posted before what they bring is needed, so that messages travel while their receiver computes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Op, OpKind


def early_receives(checked: Checked, ahead: int) -> Tapes:
    """Post each receive so many uses of received values ahead.

    Raises:
        CannotApply: when there are none, or all stand in exchanges, whose messages are issued together.
    """
    if not any(map(_receives, checked.program.tapes)):
        raise CannotApply("no rank receives a message, or only in exchanges, which are issued whole")
    return reordered(checked, partial(_wish, ahead))


def _wish(ahead: int, order: Ordering) -> None:
    order.start_ahead(_receives(order.needs.tape), ahead)


def _receives(tape: Sequence[Op]) -> list[int]:
    return [at for at, op in enumerate(tape) if op.kind is OpKind.RECV and op.batch < 0]
