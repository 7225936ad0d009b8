"""The table of ops is complete, and every user of ops handles all of them."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest

from shardlab.check import check
from shardlab.check.dataflow import COMPUTE_RULES
from shardlab.execute.communication_ops import START
from shardlab.execute.compute_ops import COMPUTE
from shardlab.language import OpKind, Refused, trace
from shardlab.language.ops import BOOKKEEPING, COLLECTIVES, COMMUNICATION, HUES, POINT_TO_POINT, Combiner, Price
from shardlab.language.rules.kinds import AUTOGRAD_KINDS
from shardlab.simulate.timeline import Costs
from shardlab.strategies import STRATEGIES
from tests.support.refusing import require_refusal


def test_every_op_has_a_rule_and_a_function_that_runs_it() -> None:
    assert set(COMPUTE_RULES) == set(OpKind) - COMMUNICATION - BOOKKEEPING
    assert set(START) == COMMUNICATION
    assert set(COMPUTE) == set(OpKind) - COMMUNICATION - {OpKind.WAIT}


def test_every_colour_is_known_where_it_is_drawn() -> None:
    for kind in set(OpKind) - BOOKKEEPING:
        assert bool(HUES[kind.row.color].lightest) == bool(kind.row.part_of), kind


def test_every_op_that_takes_time_has_a_unit_cost() -> None:
    for kind in set(OpKind) - COLLECTIVES:
        assert kind.row.price in (Price.NOTHING, Price.BYTES) or hasattr(Costs, kind.value), kind


def test_a_box_of_communication_has_letters_and_a_pass_is_an_op() -> None:
    for kind in OpKind:
        assert bool(kind.row.letters) == (kind in COMMUNICATION)
        assert not kind.row.part_of or OpKind(kind.row.part_of) in OpKind


def test_saved_values_belong_to_autograd() -> None:
    for kind in OpKind:
        assert kind.row.keeps is None or kind.row.keeps in AUTOGRAD_KINDS
        assert kind.row.saved_input < min(kind.row.inputs, default=0)


def test_collectives_are_of_groups_and_messages_of_two() -> None:
    assert {OpKind.SEND, OpKind.RECV} == POINT_TO_POINT
    assert {kind for kind in COLLECTIVES if kind.row.combines is Combiner.UNION} == {OpKind.ALL_GATHER, OpKind.GATHER}


def test_an_op_is_found_by_its_name_and_stays_itself() -> None:
    for kind in OpKind:
        assert OpKind(kind.value) is kind
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert kind.value == kind.row.name == kind.name.lower()


@pytest.mark.parametrize("kind", [OpKind.LOAD_WEIGHT, OpKind.FORWARD, OpKind.BACKWARD, OpKind.UPDATE])
def test_an_op_that_computes_has_no_handle(kind: OpKind) -> None:
    program = trace(STRATEGIES["ddp"].program, 2, 2, 2)
    tape = list(program.tapes[0])
    at = next(at for at, op in enumerate(tape) if op.kind is kind)
    tape[at] = tape[at]._replace(handle=99)
    with pytest.raises(Refused) as caught:
        check(replace(program, tapes=[tape, *program.tapes[1:]]))
    require_refusal(caught.value, "malformed tape")
