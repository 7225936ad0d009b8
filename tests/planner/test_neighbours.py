"""Neighbours differ from the chosen plan in what they name, and in nothing that is not told."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from shardlab.models import Llama
from shardlab.planner.neighbours import neighbours
from shardlab.planner.problem import Candidate, Problem
from shardlab.planner.sharded import SHARDED
from shardlab.predict.recipe import find_recipe
from shardlab.program import Mesh
from shardlab.program.precision import find_precision
from shardlab.strategies.plan import Plan
from tests.planner.problems import problem

LLAMA = Llama(layers=8, heads=8, kv_heads=8, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=2048)


def near(plan: Plan, recipe: str = "shardlab") -> dict[str, Plan]:
    """Alternatives to a plan, by what is said of them."""
    asked: Problem = replace(problem(plan.mesh.world, 32), model=LLAMA, recipe=find_recipe(recipe))
    chosen = Candidate(plan, 1, find_precision("bf16"))
    return {choice: other.plan for _, choice, other in neighbours(asked, chosen)}


def differing(one: Plan, other: Plan) -> set[str]:
    return {each.name for each in fields(Plan) if getattr(one, each.name) != getattr(other, each.name)}


def test_blocks_that_are_computed_again_stay_the_same_on_another_mesh() -> None:
    plan = Plan(Mesh(dp_shard=4, tp=2), sequence_parallel=True, recompute=(0, 1, 2))
    others = near(plan)
    assert differing(plan, others["tp 4 instead of 2"]) == {"mesh"}
    assert others["tp 1 instead of 2 (--no-sequence-parallel)"].recompute == (0, 1, 2)
    assert differing(plan, others["pp 2 instead of 1"]) == {"mesh"}


def test_what_must_follow_a_choice_is_told() -> None:
    pipeline = Plan(Mesh(pp=2, dp_shard=4), schedule="zb-h1", recompute=(0,))
    assert near(pipeline)["pp 1 instead of 2 (--schedule 1f1b)"].recompute == (0,)
    assert "interleaved-1f1b instead of zb-h1 (--stages-per-rank 2)" in near(pipeline)
    gathered: dict[str, Any] = dict.fromkeys(SHARDED, ("dp_shard",))
    kept = Plan(Mesh(dp_shard=8), reshard_after="step", **gathered)
    assert near(kept)["ZeRO-2 instead of ZeRO-3"].reshard_after == "layer", "what means nothing then is not told"


def test_alternatives_are_as_the_recipe_does_it() -> None:
    """nanotron deals blocks by cost, and reduces late where it shards."""
    plan = Plan(Mesh(pp=2, dp_shard=4), layers_per_stage=(5, 3), shard_optimizer=("dp_shard",), reduce_at="step")
    others = near(plan, "nanotron")
    (four,) = (other for choice, other in others.items() if choice.startswith("pp 4 instead of 2 (--layers-per-stage"))
    assert sum(four.layers_per_stage) == 8
    assert len(four.layers_per_stage) == 4
    assert others["data parallelism instead of ZeRO-1 (--reduce-at layer)"].reduce_at == "layer"
