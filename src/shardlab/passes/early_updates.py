"""The optimizer steps a layer as soon as its gradient is final, beside the communication that is left."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import OpKind


def early_updates(checked: Checked, _: int) -> Tapes:
    """Have every update follow its gradient.

    Raises:
        CannotApply: when nothing is updated, or no gradient is final before the norm of all is known.
    """
    if not checked.trains:
        raise CannotApply("nothing is updated")
    if checked.clips:
        raise CannotApply("gradients are clipped by a norm, so none is final before the last")
    return reordered(checked, _wish)


def _wish(order: Ordering) -> None:
    tape, needs = order.needs.tape, order.needs
    for at, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            order.start_at_once(at)
            for away in (reader for made in op.outputs for reader in needs.readers[made]):
                if tape[away].kind is OpKind.OFFLOAD:
                    order.start_at_once(away)
                    order.start_at_once(needs.over(away))
