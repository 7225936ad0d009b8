"""Copies from the host or the disk start ahead of their use, and copies to there go on beside what follows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Op, OpKind

OFFLOAD, RELOAD = OpKind.OFFLOAD, OpKind.RELOAD


def early_copies(checked: Checked, ahead: int) -> Tapes:
    """Start each reload so many uses of reloaded values ahead, and await each offload when so many more have begun.

    Raises:
        CannotApply: when nothing is copied.
    """
    if not any(_copies(tape, RELOAD) or _copies(tape, OFFLOAD) for tape in checked.program.tapes):
        raise CannotApply("nothing is kept on the host or the disk")
    return reordered(checked, partial(_wish, ahead))


def _wish(ahead: int, order: Ordering) -> None:
    needs = order.needs
    order.start_ahead(_copies(needs.tape, RELOAD), ahead)
    away = _copies(needs.tape, OFFLOAD)
    for number, at in enumerate(away):
        later = number + ahead
        order.end_before(needs.over(at), away[later] if later < len(away) else len(needs.tape))


def _copies(tape: Sequence[Op], kind: OpKind) -> list[int]:
    return [at for at, op in enumerate(tape) if op.kind is kind]
