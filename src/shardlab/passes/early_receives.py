"""Receives are posted before what they bring is needed, so that messages travel while their receiver computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Op, OpKind, Spec
from shardlab.program.pass_names import Ahead


def early_receives(checked: Checked, ahead: int | Ahead) -> Tapes:
    """Post each receive so many uses of received values ahead.

    Raises:
        CannotApply: when there are none, or all stand in exchanges, whose messages are issued together.
    """
    if not any(map(receives_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no rank receives a message, or only in exchanges, which are issued whole")
    return reordered(checked, partial(_wish, ahead))


def _wish(ahead: int | Ahead, order: Ordering) -> None:
    order.start_ahead(receives_ahead(order.needs.tape, {}), ahead)


def receives_ahead(tape: Sequence[Op], _: Mapping[int, Spec]) -> list[int]:
    """Where a tape posts receives that stand alone."""
    return [at for at, op in enumerate(tape) if op.kind is OpKind.RECV and op.batch < 0]
