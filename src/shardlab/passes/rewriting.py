"""Tapes in another order, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.program import Op

Tapes = list[list[Op]]


def reordered(checked: Checked, wish: Callable[[Ordering], None]) -> Tapes:
    """Every rank's tape, in the order that its wishes give."""
    tapes: Tapes = []
    for rank, tape in enumerate(checked.program.tapes):
        order = Ordering(tape, rank, checked.specs[rank])
        wish(order)
        tapes.append(order.tape())
    return tapes
