"""Weights are gathered ahead of their use, while earlier layers compute.

FSDP's prefetching (Zhao et al. 2023, arXiv 2304.11277, section 3.3.2), on any tape.
"""

from __future__ import annotations

from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import Tapes, reordered
from shardlab.program import Kind, OpKind


def prefetch(checked: Checked, ahead: int) -> Tapes:
    """Start each gather of weights so many uses of gathered weights ahead."""
    return reordered(checked.program.tapes, checked.specs, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int, order: Ordering) -> None:
    needs, specs = order.needs, checked.specs[order.rank]
    gathers: list[int] = []
    for at, op in enumerate(needs.tape):
        if op.kind is OpKind.ALL_GATHER:
            whole = specs[op.outputs[0]]
            if whole.kind is Kind.WEIGHT and not whole.step:
                gathers.append(at)
    uses = [min(needs.readers[needs.tape[at].outputs[0]], default=at) for at in gathers]
    for number, at in enumerate(gathers):
        order.start_before(at, uses[number - ahead] if number >= ahead else gathers[0])
