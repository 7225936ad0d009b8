"""The six figures: they add up, they agree with other definitions, and they are right where they can be worked out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.api import check
from shardlab.check import check as prove
from shardlab.language import Mesh
from shardlab.simulate.timeline import PUZZLE_COSTS, TEACHING_COSTS, Costs, Timeline, bubble, schedule_bubble, simulate
from shardlab.simulate.timeline.figures import IdleCause, closed_form, figures_of
from shardlab.simulate.timeline.timeline import rank_times
from shardlab.strategies.plan.plan import Plan
from tests.support.random_plans import random_plan
from tests.support.thorough import examples

FREE_MESSAGES = replace(PUZZLE_COSTS, send=0.0, recv=0.0, collective=0.0, update=0.0)
THIRDS = Costs(forward=1, backward_input=1, backward_weight=1, update=0, collective=0, send=0, recv=0)


@settings(max_examples=examples(15), deadline=None)
@given(seed=st.integers(0, 10**6), teaching=st.booleans())
def test_shares_of_any_plan_add_up_to_the_step(seed: int, teaching: bool) -> None:
    timeline = simulate(prove(random_plan(seed).program), TEACHING_COSTS if teaching else PUZZLE_COSTS)
    figures = figures_of(timeline)
    assert figures.compute + figures.exposed + sum(figures.idle.values()) == pytest.approx(1.0)
    assert figures.overlap is None or -1e-9 <= figures.overlap <= 1 + 1e-9
    assert figures.excess >= 0
    for row, rank in enumerate(figures.ranks):
        times = rank_times(timeline, row)
        assert (rank.computing, rank.exposed, rank.idle) == pytest.approx(tuple(times))
        assert sum(rank.idle_by_cause.values()) == pytest.approx(rank.idle, abs=1e-6 * timeline.end)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 4), (4, 4), (4, 8), (3, 7)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_the_bubble_is_its_closed_form_if_messages_are_free(name: str, ranks: int, microbatches: int) -> None:
    checked = check(name, ranks=ranks, layers=ranks, microbatches=microbatches)
    timeline = simulate(checked, FREE_MESSAGES)
    figures = figures_of(timeline, name, free=schedule_bubble(checked, FREE_MESSAGES))
    assert figures.closed_form == (ranks - 1) / (microbatches + ranks - 1)
    assert figures.bubble == pytest.approx(figures.closed_form)
    assert figures.bubble_with_communication == bubble(timeline) == figures.bubble


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "breadth-first"])
def test_the_bubble_of_looped_schedules_is_smaller_by_their_stages(schedule: str) -> None:
    plan = Plan(Mesh(pp=4), schedule=schedule, stages_per_rank=2)
    timeline = simulate(check(plan, layers=8, microbatches=8), FREE_MESSAGES)
    figures = figures_of(timeline, schedule)
    assert figures.closed_form == 3 / (2 * 8 + 3)
    assert figures.bubble_with_communication == pytest.approx(figures.closed_form)


def test_the_bubble_of_zb_h1_is_its_closed_form() -> None:
    timeline = simulate(check("zb-h1", ranks=4, layers=4, microbatches=8), THIRDS)
    figures = figures_of(timeline, "zb-h1")
    assert figures.closed_form == pytest.approx(3 / (3 * 8 + 3))
    assert figures.bubble_with_communication == pytest.approx(figures.closed_form)


def test_zb_v_has_no_bubble_if_its_passes_take_as_long() -> None:
    timeline = simulate(check("zb-v", ranks=4, microbatches=8), THIRDS)
    figures = figures_of(timeline, "zb-v")
    assert figures.bubble_with_communication == figures.closed_form == 0.0


def test_a_schedule_without_a_formula_and_no_pipeline_have_no_closed_form() -> None:
    assert closed_form(simulate(check("pipeline"), PUZZLE_COSTS), "") == ("", None)
    figures = figures_of(simulate(check("fsdp")), "1f1b")
    assert (figures.bubble, figures.closed_form, figures.formula) == (None, None, "")


def test_data_parallel_ranks_have_communication_that_is_exposed_or_hidden() -> None:
    hidden = figures_of(simulate(check("ddp", microbatches=8), replace(PUZZLE_COSTS, collective=0.01)))
    assert hidden.exposed < 0.01
    blocking = figures_of(simulate(check("fsdp"), PUZZLE_COSTS))
    assert (blocking.overlap, blocking.exposed) == pytest.approx((0.0, 3.6 / 13.6))


def test_a_pipeline_idles_because_its_messages_are_not_sent_yet() -> None:
    figures = figures_of(simulate(check("gpipe"), FREE_MESSAGES), "gpipe")
    assert next(iter(figures.idle)) is IdleCause.MESSAGE
    assert figures.ranks[0].waited_for > 0


def test_a_rank_that_ends_early_has_ended() -> None:
    figures = figures_of(simulate(check("pipeline"), PUZZLE_COSTS))
    assert any(IdleCause.ENDED in rank.idle_by_cause for rank in figures.ranks)


def test_the_straggler_is_the_rank_that_computes_longest() -> None:
    timeline = simulate(check("ddp", ranks=4), PUZZLE_COSTS)
    slow = [
        [e._replace(start=2 * e.start, end=2 * e.end) if row == 2 else e for e in events]
        for row, events in enumerate(timeline.events)
    ]
    figures = figures_of(Timeline(timeline.program, slow))
    assert figures.straggler == 2
    assert figures.excess == pytest.approx(2 / 1.25 - 1)


def test_figures_as_json_are_the_figures() -> None:
    figures = figures_of(simulate(check("gpipe")), "gpipe")
    data = figures.as_dict()
    assert data["compute"] == figures.compute
    assert data["bubble_closed_form"] == 3 / 7
    assert sum(data["idle"].values()) + data["compute"] + data["exposed_communication"] == pytest.approx(1)
    assert len(data["ranks"]) == 4
