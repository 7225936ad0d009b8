"""Problems of real steps: their costs are those of the replay, and a found schedule gains there what it promises."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.planner.schedule_search.from_workload import problem_of, with_schedule
from shardlab.planner.schedule_search.search import search_schedule
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan


def workload(plan: Plan, microbatches: int = 8) -> Workload:
    model, cluster = find_model("llama3-8b"), find_cluster(f"h100x{plan.mesh.world}")
    recipe = find_recipe("megatron-core")
    return Workload(plan, model, cluster, microbatches, 1, find_precision("bf16"), recipe=recipe, passes="none")


PLAN = Plan(Mesh(pp=4, tp=2), sequence_parallel=True)


def test_costs_of_stages_add_up_to_a_published_step() -> None:
    """The search's clock and the replay differ by the optimizer, and by messages that share a link."""
    step = workload(PLAN)
    found = search_schedule(problem_of(step, placement="vee", stages_per_rank=2), evaluations=0)
    for each in found.published:
        if each.fits and each.name != "dualpipe-v":
            whole = replace(step, plan=replace(PLAN, schedule=each.name)).estimate()
            assert each.time == pytest.approx(whole.step, rel=0.06), each.name


def test_the_head_makes_the_last_stage_slower_and_larger() -> None:
    problem = problem_of(workload(PLAN))
    first, *_, last = problem.stages
    assert last.forward > 1.1 * first.forward
    assert last.activation > 1.3 * first.activation
    assert 0 < first.kept_memory < first.activation


def test_a_found_schedule_is_faster_in_the_whole_step_as_well_and_fits() -> None:
    step = workload(PLAN, 16)
    memory = 60.0 * 2**30
    problem = problem_of(step, placement="vee", stages_per_rank=2, memory=memory)
    found = search_schedule(problem, evaluations=300)
    whole = with_schedule(step, found.steps).estimate()
    best = found.best_published
    assert best is not None
    published = replace(step, plan=replace(PLAN, schedule=best.name)).estimate()
    assert whole.step < published.step
    assert whole.peak.bytes <= memory * 1.01


def test_recomputed_stages_keep_little() -> None:
    full = problem_of(workload(replace(PLAN, recompute="full"))).stages[1]
    none = problem_of(workload(PLAN)).stages[1]
    assert full.activation < 0.2 * none.activation
    assert full.input > 1.5 * none.input
    assert full.forward == pytest.approx(none.forward)
