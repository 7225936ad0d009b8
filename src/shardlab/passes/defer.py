"""Gradients are reduced while earlier layers' are computed: a reduction is awaited as late as memory allows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import LIGHT, Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Kind, Op, OpKind, Spec

REDUCTIONS = frozenset({OpKind.REDUCE_SCATTER, OpKind.ALL_REDUCE, OpKind.REDUCE})


def defer(checked: Checked, ahead: int) -> Tapes:
    """Await each reduction of a gradient, and update by it, when so many more have been started.

    Raises:
        CannotApply: when no gradient is reduced.
    """
    if not any(map(_reductions, checked.program.tapes, checked.specs)):
        raise CannotApply("no gradient of weights is reduced, so none can be awaited later")
    return reordered(checked, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int, order: Ordering) -> None:
    needs = order.needs
    started = _reductions(needs.tape, checked.specs[order.rank])
    for number, at in enumerate(started):
        later = started[number + ahead] if number + ahead < len(started) else len(needs.tape)
        awaited = needs.over(at)
        for late in (awaited, *_updates(order, awaited)):
            order.end_before(late, later)


def _updates(order: Ordering, awaited: int) -> Iterator[int]:
    """The updates that an op's result goes to, at once or by what follows it."""
    for at in order.needs.after[awaited]:
        kind = order.needs.tape[at].kind
        if kind is OpKind.UPDATE:
            yield at
        elif kind in LIGHT:
            yield from _updates(order, at)


def _reductions(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    return [at for at, op in enumerate(tape) if op.kind in REDUCTIONS and specs[op.inputs[0]].kind is Kind.GRAD_WEIGHT]
