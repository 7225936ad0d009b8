"""Weights are gathered ahead of their use, while earlier layers compute.

FSDP's prefetching (Zhao et al. 2023, arXiv 2304.11277, section 3.3.2), on any tape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from shardlab.check import Checked
from shardlab.passes.ordering import Ordering
from shardlab.passes.rewriting import CannotApply, Tapes, reordered
from shardlab.program import Kind, Op, OpKind, Spec
from shardlab.program.pass_names import Ahead


def prefetch(checked: Checked, ahead: int | Ahead) -> Tapes:
    """Start each gather of weights so many uses of gathered weights ahead.

    Raises:
        CannotApply: when none are gathered before they are used.
    """
    if not any(map(gathers_ahead, checked.program.tapes, checked.specs)):
        raise CannotApply("no weights are gathered for a pass, so there is nothing to gather ahead")
    return reordered(checked, partial(_wish, checked, ahead))


def _wish(checked: Checked, ahead: int | Ahead, order: Ordering) -> None:
    order.start_ahead(gathers_ahead(order.needs.tape, checked.specs[order.rank]), ahead)


def gathers_ahead(tape: Sequence[Op], specs: Mapping[int, Spec]) -> list[int]:
    """Where a tape gathers weights that this step uses; new ones are for the next."""
    gathered = [at for at, op in enumerate(tape) if op.kind is OpKind.ALL_GATHER]
    wholes = [specs[tape[at].outputs[0]] for at in gathered]
    return [at for at, whole in zip(gathered, wholes, strict=True) if whole.kind is Kind.WEIGHT and not whole.step]
