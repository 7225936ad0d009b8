"""Gradients are reduced while earlier layers' are computed: a reduction is awaited as late as memory allows."""

from __future__ import annotations

from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import Tapes, reordered
from shardlab.program import Kind, OpKind

REDUCTIONS = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.REDUCE})


def defer(checked: Checked, ahead: int) -> Tapes:
    """Await each reduction of a gradient when so many more have been started, and at the latest where it is used."""
    return reordered(checked.program.tapes, checked.specs, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int, order: Ordering) -> None:
    needs, specs = order.needs, checked.specs[order.rank]
    started = [
        at for at, op in enumerate(needs.tape) if op.kind in REDUCTIONS and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT
    ]
    for number, at in enumerate(started):
        later = number + ahead
        order.end_before(needs.over(at), started[later] if later < len(started) else len(needs.tape))
