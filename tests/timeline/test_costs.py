"""What ops cost."""

from __future__ import annotations

from shardlab.program import OpKind
from shardlab.timeline import UNIT_COSTS, Costs


def test_the_halves_of_a_backward_pass_are_the_whole() -> None:
    assert UNIT_COSTS.backward == UNIT_COSTS.forward == 1
    assert Costs(backward_input=18.086, backward_weight=9.337).backward == 18.086 + 9.337


def test_passes_are_paid_for_each_microbatch_and_other_ops_once() -> None:
    costs = Costs(forward=2, recompute=3, backward_input=1, backward_weight=4, loss=6, add=7, update=8)
    each = {OpKind.FORWARD: 2, OpKind.RECOMPUTE: 3, OpKind.BACKWARD: 5}
    once = {OpKind.LOSS: 6, OpKind.ADD: 7, OpKind.UPDATE: 8}
    for kind in OpKind:
        if kind in each:
            assert costs.duration(kind, 3) == 3 * each[kind]
        elif kind in once:
            assert costs.duration(kind, 3) == once[kind]


def test_loading_and_bookkeeping_are_free() -> None:
    loads = {kind for kind in OpKind if kind.value.startswith("load")}
    assert loads
    for kind in {*loads, OpKind.WAIT, OpKind.FREE}:
        assert UNIT_COSTS.duration(kind, 3) == 0
