"""Tapes in another order, on every rank alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from shardlab.passes.ordering import Ordering
from shardlab.program import Op, Spec

Tapes = list[list[Op]]


class CannotApply(Exception):
    """A pass has nothing to do on a program; its text, half a sentence, says why."""


def reordered(
    tapes: Sequence[Sequence[Op]], specs: Sequence[Mapping[int, Spec]], wish: Callable[[Ordering], None]
) -> Tapes:
    """Every rank's tape, in the order that its wishes give.

    Args:
        tapes: of a program that passes the check.
        specs: for each rank those of its values.
        wish: says what goes where on one tape.
    """
    found: Tapes = []
    for rank, tape in enumerate(tapes):
        order = Ordering(tape, rank, specs[rank])
        wish(order)
        found.append(order.tape())
    return found
