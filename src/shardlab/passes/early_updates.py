"""The optimizer steps a layer as soon as its gradient is final, beside the communication that is left."""

from __future__ import annotations

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import Tapes, reordered
from shardlab.program import OpKind


def early_updates(checked: Checked, _: int) -> Tapes:
    """Have every update follow its gradient; where a norm clips, no gradient is final before the last."""

    def wish(order: Ordering) -> None:
        for at, op in enumerate(order.needs.tape):
            if op.kind is OpKind.UPDATE:
                order.start_at_once(at)

    return reordered(checked.program.tapes, checked.specs, wish)
