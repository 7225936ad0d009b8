"""Passes one after the other: what is taken, and what is promised of it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.check import check
from shardlab.language import Program, Strategy
from shardlab.language.pass_names import Ahead
from shardlab.simulate.passes import PASSES, Goal, run_named, run_passes, settled
from shardlab.strategies.wsdp import wsdp
from tests.simulate.passes.late_programs import awaited_at_once, checked, received_late
from tests.support.passing import is_right
from tests.support.random_plans import random_plan
from tests.support.random_programs import random_program, random_shape


def random_subject(seed: int) -> Program:
    """A program written at random, or a plan's."""
    return random_program(random_shape(seed)) if seed % 2 else random_plan(seed, ranks=4).program


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_passes_in_any_order_take_no_more_time_and_no_backend(seed: int) -> None:
    """The numbers are right after all of them."""
    random = Random(seed)
    program = check(random_subject(seed))
    found = run_passes(program, random.choices(list(PASSES.values()), k=4))
    times = [each.end for each in found]
    assert times == sorted(times, reverse=True)
    assert all(set(program.backends()) <= set(each.checked.backends()) for each in found)
    is_right(found[-1].checked.program)


@settings(max_examples=10)
@given(st.integers(0, 10**6))
def test_where_memory_is_full_passes_take_no_more_of_it(seed: int) -> None:
    random = Random(seed)
    found = run_passes(check(random_subject(seed)), random.choices(list(PASSES.values()), k=4), Goal(memory=0))
    peaks, times = [each.peak for each in found], [each.end for each in found]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times, reverse=True)


def test_the_fastest_that_fits_into_the_memory_is_taken() -> None:
    late = checked(awaited_at_once, 2, 3, 2)
    before, freely = run_named(late, "defer")
    (_, within) = run_named(late, "defer", Goal(memory=freely.peak - 1))
    assert freely.end < within.end < before.end
    assert (freely.setting, within.setting) == (2, 1)
    assert run_named(late, "defer", Goal(memory=freely.peak))[-1].setting == freely.setting


def test_where_only_what_does_not_fit_is_faster_it_is_said() -> None:
    late = checked(awaited_at_once, 2, 3, 2)
    before, freely = run_named(late, "defer")
    assert freely.peak > before.peak
    (_, left) = run_named(late, "defer", Goal(memory=before.peak))
    assert (left.setting, left.why_not) == (None, "what is faster takes more memory than there is")
    assert left.checked is before.checked


@pytest.mark.parametrize(("strategy", "name"), [(received_late, "receive-early"), (wsdp, "prefetch")])
def test_where_memory_has_no_room_for_all_that_may_start_early_the_rest_does(strategy: Strategy, name: str) -> None:
    """Only what stands at the peak stays where it was; a setting says which, and makes the same program again."""
    late = checked(strategy, 2, 2)
    before, freely = run_named(late, name)
    assert freely.peak > before.peak
    found = run_named(late, name, Goal(memory=before.peak))
    within = found[-1]
    assert freely.end < within.end < before.end
    assert within.peak == before.peak
    assert isinstance(within.setting, Ahead)
    assert within.setting.but
    assert run_named(late, settled(found))[-1].checked.program == within.checked.program
