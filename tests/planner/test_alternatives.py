"""Neighbours differ from the chosen plan in what they name, and in nothing that is not told."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models import Llama
from shardlab.planner.alternatives import Alternative, alternative_text, better_than, neighbours
from shardlab.planner.describe import StepShares
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.results import PlanOutcome
from shardlab.planner.space import SHARDED
from shardlab.planner.workers import Answer, Query, answer_request
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.strategies.plan.plan import Plan
from tests.planner.problems import problem

LLAMA = Llama(layers=8, heads=8, kv_heads=8, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=2048)


def near(plan: Plan, recipe: str = "shardlab") -> dict[str, Plan]:
    """Alternatives to a plan, by what is said of them."""
    search_problem: Problem = replace(problem(plan.mesh.world, 32), model=LLAMA, recipe=find_recipe(recipe))
    candidate = Candidate(plan, 1, find_precision("bf16"))
    return {choice: other.plan for _, choice, other in neighbours(search_problem, candidate)}


def differing(one: Plan, other: Plan) -> set[str]:
    return {field.name for field in fields(Plan) if getattr(one, field.name) != getattr(other, field.name)}


def test_blocks_that_are_computed_again_stay_the_same_on_another_mesh() -> None:
    plan = Plan(Mesh(dp_shard=4, tp=2), sequence_parallel=True, recompute=(0, 1, 2))
    others = near(plan)
    assert differing(plan, others["tp 4 instead of 2"]) == {"mesh"}
    assert others["tp 1 instead of 2 (--no-sequence-parallel)"].recompute == (0, 1, 2)
    assert differing(plan, others["pp 2 instead of 1"]) == {"mesh"}


def test_what_must_follow_a_choice_is_reported() -> None:
    pipeline = Plan(Mesh(pp=2, dp_shard=4), schedule="zb-h1", recompute=(0,))
    assert near(pipeline)["pp 1 instead of 2 (--schedule 1f1b)"].recompute == (0,)
    assert "interleaved-1f1b instead of zb-h1 (--stages-per-rank 2)" in near(pipeline)
    gathered: dict[str, Any] = dict.fromkeys(SHARDED, ("dp_shard",))
    until_step_end = Plan(Mesh(dp_shard=8), reshard_after="step", **gathered)
    assert near(until_step_end)["ZeRO-2 instead of ZeRO-3"].reshard_after == "layer", (
        "what means nothing then is not told"
    )


def test_alternatives_are_as_the_recipe_does_it() -> None:
    """nanotron deals blocks by cost, and reduces late where it shards."""
    plan = Plan(Mesh(pp=2, dp_shard=4), layers_per_stage=(5, 3), shard_optimizer=("dp_shard",), reduce_at="step")
    others = near(plan, "nanotron")
    (four,) = (other for choice, other in others.items() if choice.startswith("pp 4 instead of 2 (--layers-per-stage"))
    assert sum(four.layers_per_stage) == 8
    assert len(four.layers_per_stage) == 4
    assert others["data parallelism instead of ZeRO-1 (--reduce-at layer)"].reduce_at == "layer"


# Reasons tell what an alternative costs, and name a better one.


SMALL = Llama(layers=1, heads=2, kv_heads=2, hidden_size=64, ffn_hidden_size=1536, vocab_size=1000, seq_len=128)


def test_memory_is_as_much_only_where_a_hundredth_differs() -> None:
    """Whatever the size of the model."""
    search_problem = replace(problem(2, 4), model=SMALL)
    cluster = replace(search_problem.cluster, device=replace(search_problem.cluster.device, memory=2.0**40))
    plain = replace(
        search_problem,
        cluster=cluster,
        recipe=replace(search_problem.recipe, memory=replace(search_problem.recipe.memory, context_bytes=0.0)),
    )
    one, two = (Candidate(Plan(Mesh(dp_shard=2)), size, find_precision("bf16")) for size in (1, 2))
    one_answer, two_answer = (answer_request(plain, Query(candidate, shares=True)) for candidate in (one, two))
    assert isinstance(one_answer, Answer)
    assert isinstance(two_answer, Answer)
    assert alternative_text(Alternative("batch", "", two, two_answer), one_answer, plain).startswith("+")
    assert alternative_text(Alternative("batch", "", one, one_answer), one_answer, plain).startswith("as much memory")


def test_shares_below_nothing_are_said_to_be_nothing() -> None:
    """As parts of a step are when they are extended to all microbatches."""
    search_problem = problem(2, 4)
    candidate = Candidate(Plan(Mesh(dp_shard=2)), 1, find_precision("bf16"))
    answer = answer_request(search_problem, Query(candidate, shares=True))
    assert isinstance(answer, Answer)
    best = replace(answer, shares=StepShares({"compute": 1.0004, "idle": -0.0004}))
    other = replace(answer, shares=StepShares({"compute": 0.891, "idle": 0.109 + 0.002}))
    assert alternative_text(Alternative("speed", "", candidate, other), best, search_problem).endswith(
        "(idle 0.0% → 11.1%)"
    )


def test_a_plan_found_with_as_many_ranks_along_an_axis_is_named_where_it_is_faster() -> None:
    search_problem = problem(4, 8)
    bf16 = find_precision("bf16")
    best, alone = Candidate(Plan(Mesh(dp_shard=4)), 1, bf16), Candidate(Plan(Mesh(dp_shard=2, tp=2)), 1, bf16)
    with_more = Candidate(Plan(Mesh(dp_shard=2, tp=2), sequence_parallel=True), 4, bf16)
    answer = answer_request(search_problem, Query(best))
    assert isinstance(answer, Answer)
    slow, fast = (replace(answer.forecast, seconds=answer.forecast.seconds * times) for times in (1.8, 1.012))
    outcomes = [PlanOutcome(best, answer.forecast), PlanOutcome(with_more, fast), PlanOutcome(alone, slow)]
    better = better_than(alone, best, outcomes)
    assert better == outcomes[1]
    assert better_than(with_more, best, outcomes) is None
    assert better_than(replace(best, micro_batch_size=2), best, outcomes) is None, "it names no axis"
    text = alternative_text(Alternative("speed", "", alone, Answer(slow, None), better), answer, search_problem)
    assert text == "as much memory, step +80.0%; with others changed too, step +1.2%: replicate 2, tp 2, mb 4"
    assert "others changed" not in alternative_text(
        Alternative("speed", "", alone, Answer(fast, None), better), answer, search_problem
    )
