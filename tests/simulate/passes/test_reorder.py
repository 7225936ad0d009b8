"""Any order that keeps to a tape's dependences is right, and one that does not is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import Checked, check
from shardlab.common.errors import Refused
from shardlab.language import OpKind, Program
from shardlab.simulate.passes import PASSES
from shardlab.simulate.passes.reorder import CannotApply, Ordering, reordered
from shardlab.strategies.fsdp import fsdp
from tests.simulate.passes.late_programs import checked, updated_last
from tests.simulate.timeline.programs import reductions_at_once
from tests.support.passing import is_right
from tests.support.random_layers import random_attention, random_experts
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape
from tests.support.thorough import examples

WRITERS: list[Callable[[int], Program]] = [
    lambda seed: random_program(random_shape(seed)),
    lambda seed: random_plan(seed, ranks=4).program,
    random_attention,
    random_experts,
]


@settings(max_examples=examples(25))
@given(st.integers(0, 10**6))
def test_every_order_that_a_pass_makes_of_any_program_is_right(seed: int) -> None:
    """Not only those that are kept: what the check would refuse is a mistake of the pass."""
    random = Random(seed)
    program = check(random.choice(WRITERS)(seed))
    for chosen_pass in random.choices([chosen_pass for chosen_pass in PASSES.values() if chosen_pass.settings], k=3):
        try:
            tapes = chosen_pass.rewrite(program, random.choice([1, 2, 3, 8, 99]))
        except CannotApply:
            continue
        program = is_right(replace(program.program, tapes=tapes))


@settings(max_examples=examples(20))
@given(st.integers(0, 10**6))
def test_every_order_that_anybody_may_wish_is_right(seed: int) -> None:
    """Some ops start early, others end late, at random: no number changes."""
    random = Random(seed)
    program = check(random.choice(WRITERS)(seed))

    def wish(order: Ordering) -> None:
        tape = order.needs.tape
        for _ in range(random.randint(1, 8)):
            at, other = random.randrange(len(tape)), random.randrange(len(tape) + 1)
            if tape[at].batch < 0 and tape[at].kind is not OpKind.WAIT and random.random() < 0.5:
                order.start_before(at, min(other, len(tape) - 1))
            elif tape[at].kind is OpKind.WAIT or (tape[at].handle < 0 and tape[at].kind is not OpKind.FREE):
                order.end_before(at, other)

    is_right(replace(program.program, tapes=reordered(program, wish)))


def test_without_a_wish_a_tape_stays_as_it_is() -> None:
    program = checked(fsdp, 2)
    tapes = reordered(program, lambda order: None)
    assert tapes == program.program.tapes


def place(order: Ordering, kind: OpKind, number: int = 0) -> int:
    """The index of an op of a kind: of the first, or of a later one."""
    return [at for at, op in enumerate(order.needs.tape) if op.kind is kind][number]


def forget(order: Ordering, first: int, second: int) -> None:
    """Leave out that one op comes after another."""
    order.needs.predecessors[second].remove(first)
    order.needs.successors[first].remove(second)


def read_before_its_wait(order: Ordering) -> None:
    forward = place(order, OpKind.FORWARD)
    (wait,) = [at for at in order.needs.predecessors[forward] if order.needs.tape[at].kind is OpKind.WAIT]
    forget(order, wait, forward)
    order.start_before(forward, wait)


def freed_before_it_is_read(order: Ordering) -> None:
    tape = order.needs.tape
    free = place(order, OpKind.FREE)
    (read,) = [at for at in order.needs.predecessors[free] if tape[at].kind in (OpKind.FORWARD, OpKind.BACKWARD)]
    forget(order, read, free)
    order.start_at_once(place(order, OpKind.UPDATE))


def written_before_it_is_read(order: Ordering) -> None:
    update, forward = place(order, OpKind.UPDATE, -1), place(order, OpKind.FORWARD, -1)
    forget(order, forward, update)
    order.start_before(update, forward)


def out_of_turn_on_one_rank(order: Ordering) -> None:
    if order.rank == 0:
        first, second = (place(order, OpKind.ALL_REDUCE, number) for number in (0, 1))
        forget(order, first, second)
        order.end_before(first, second + 1)


MISTAKES: list[tuple[Callable[[Ordering], None], Checked, str]] = [
    (read_before_its_wait, checked(fsdp, 2), "in flight"),
    (freed_before_it_is_read, checked(fsdp, 2), "freed"),
    (written_before_it_is_read, checked(updated_last, 1, 3), "freed"),
    (out_of_turn_on_one_rank, checked(reductions_at_once, 2), "other order"),
]


@pytest.mark.parametrize(("mistake", "program", "rule"), MISTAKES, ids=[row[0].__name__ for row in MISTAKES])
def test_an_order_that_forgets_a_dependence_is_refused(
    mistake: Callable[[Ordering], None], program: Checked, rule: str
) -> None:
    tapes = reordered(program, mistake)
    assert tapes != program.program.tapes
    with pytest.raises(Refused) as refused:
        check(replace(program.program, tapes=tapes))
    assert refused.value.rule == rule
