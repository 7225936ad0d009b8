"""Tapes in another order, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.program import Op

Tapes = list[list[Op]]


class CannotApply(Exception):
    """A pass has nothing to do on a program; its text, half a sentence, says why."""


def reordered(checked: Checked, wish: Callable[[Ordering], None]) -> Tapes:
    """Every rank's tape, in the order that its wishes give; `wish` says what goes where on one tape."""
    found: Tapes = []
    for needs in checked.dependences:
        order = Ordering(needs)
        wish(order)
        found.append(order.tape())
    return found
