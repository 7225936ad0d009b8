"""Problems of real steps: their costs are those of the replay, and a found schedule gains there what it promises."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import find_model
from shardlab.planner.schedule_search.from_workload import problem_of
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
    found = search_schedule(problem_of(step, placement="vee", stages_per_rank=2).pipeline, evaluations=0)
    for each in found.published:
        if each.fits and each.name != "dualpipe-v":
            whole = replace(step, plan=replace(PLAN, schedule=each.name)).estimate()
            assert each.time == pytest.approx(whole.step, rel=0.06), each.name


def test_the_head_makes_the_last_stage_slower_and_larger() -> None:
    problem = problem_of(workload(PLAN)).pipeline
    first, *_, last = problem.stages
    assert last.forward > 1.1 * first.forward
    assert last.activation > 1.3 * first.activation
    assert 0 < first.kept_memory < first.activation


def test_a_found_schedule_is_faster_in_the_whole_step_as_well_and_fits() -> None:
    step = workload(PLAN, 16)
    memory = 60.0 * 2**30
    problem = problem_of(step, placement="vee", stages_per_rank=2, memory=memory)
    found, whole = problem.search(partial(search_schedule, evaluations=300))
    best = found.best_published
    assert best is not None
    published = replace(step, plan=replace(PLAN, schedule=best.name)).estimate()
    assert whole.step < published.step
    assert whole.peak.bytes <= memory


def test_a_step_that_gathers_weights_finds_a_schedule_that_fits_with_them() -> None:
    """A recomputed stage keeps more after its input half than after its forward pass."""
    sharded = ("dp_shard",)
    plan = replace(PLAN, mesh=Mesh(pp=2, dp_shard=4), recompute="full", sequence_parallel=False)
    plan = replace(plan, shard_parameters=sharded, shard_gradients=sharded, shard_optimizer=sharded)
    problem = problem_of(workload(plan, 64), memory=76.0 * 2**30)
    assert problem.pipeline.stages[1].kept_memory > problem.pipeline.stages[1].activation
    found, whole = problem.search(partial(search_schedule, evaluations=20))
    assert whole.peak.bytes <= 76 * 2**30
    assert max(found.problem.limits) <= max(problem.pipeline.limits)


def test_recomputed_stages_keep_little() -> None:
    full = problem_of(workload(replace(PLAN, recompute="full"))).pipeline.stages[1]
    none = problem_of(workload(PLAN)).pipeline.stages[1]
    assert full.activation < 0.2 * none.activation
    assert full.input > 1.5 * none.input
    assert full.forward == pytest.approx(none.forward)
