"""The space of plans: a value that a user fixes is taken as given, whether it is tried otherwise or not."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from shardlab.common.errors import UserError
from shardlab.language import Mesh
from shardlab.models import Llama
from shardlab.planner.nothing_fits import explain_empty_space
from shardlab.planner.problem import Limits, Problem
from shardlab.planner.workers import Query, answer_request
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.strategies.plan.plan import Plan
from tests.planner.enumeration import candidates, shapes
from tests.planner.problems import problem

LLAMA = Llama(layers=6, heads=8, kv_heads=4, hidden_size=512, ffn_hidden_size=1536, vocab_size=1000, seq_len=4096)

FIXED: dict[str, Any] = {
    "schedule": "gpipe",
    "stages_per_rank": 1,
    "layers_per_stage": (2, 4),
    "shard_parameters": ("dp_shard",),
    "shard_gradients": ("dp_shard",),
    "shard_optimizer": ("dp_replicate", "dp_shard"),
    "reduce_every_microbatch": ("dp_shard",),
    "reduce_at": "step",
    "reshard_after": "stage",
    "sequence_parallel": False,
    "recompute": (0, 3),
    "context": "all_gather",
    "ulysses_degree": 4,
    "stripes": 2,
    "passes": "prefetch",
}
"""A value of every field of a plan, most of which are tried for no plan if nobody asks for them."""


def fixing(maxima: dict[str, int] | None = None, **fixed: Any) -> Problem:
    return replace(problem(4, 8, limits=Limits(fixed, maxima or {}, 1)), model=LLAMA)


def plans(problem: Problem) -> list[Plan]:
    return [candidate.plan for shape in shapes(problem) for candidate in candidates(problem, shape)]


def test_every_field_of_a_plan_is_fixed_once_here() -> None:
    """All but the blocks that are frozen, with which no plan is searched."""
    assert [*FIXED, "freeze"] == sorted([field.name for field in fields(Plan)[1:]], key=[*FIXED, "freeze"].index)


@pytest.mark.parametrize("name", FIXED)
def test_a_field_that_is_fixed_has_its_value_in_every_plan(name: str) -> None:
    problem = fixing(None, **{"recompute": "none", name: FIXED[name]})
    pairs = [(shape, candidate) for shape in shapes(problem) for candidate in candidates(problem, shape)]
    assert {getattr(candidate.plan, name) for _, candidate in pairs} == {FIXED[name]}
    assert len(set(pairs)) == len(pairs), "none is there twice"
    assert any(answer_request(problem, Query(candidate)) for _, candidate in pairs[:: 1 + len(pairs) // 12])


def test_what_is_not_fixed_stays_as_it_was() -> None:
    """Only plans with at least two ranks of the axes along which a user cuts are left."""
    problem = fixing(shard_optimizer=("dp_shard",), recompute="none", pp=1)
    assert {plan.zero_stage for plan in plans(problem)} == {1, 2, 3}
    assert min(plan.mesh.dp_shard for plan in plans(problem)) == 2
    assert {plan.mesh.tp for plan in plans(problem)} == {1, 2}


def test_ranks_that_share_nothing_may_be_more_than_the_most_that_share() -> None:
    kinds = {(plan.mesh.dp_shard, plan.zero_stage) for plan in plans(fixing({"dp_shard": 1, "tp": 1, "cp": 1}, pp=1))}
    assert kinds == {(4, 0)}
    kinds = {(plan.mesh.dp_shard, plan.zero_stage) for plan in plans(fixing({"dp_shard": 2, "tp": 1, "cp": 1}, pp=1))}
    assert kinds == {(4, 0), (2, 3), (2, 2), (2, 1)}, "two replicas of two shards beside plain data parallelism"
    assert not Limits(maximum={"dp_shard": 2}).allow(Plan(Mesh(dp_shard=4), shard_optimizer=("dp_shard",)))


def test_a_value_that_no_plan_can_have_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UserError, match="there is no schedule '1f1bb'; did you mean 1f1b"):
        Limits({"schedule": "1f1bb"})
    with pytest.raises(
        UserError,
        match="recompute is '0,50'; give one of none, selective, full, per-op",
    ):
        Limits({"recompute": "0,50"})


def test_what_a_framework_does_not_have_is_not_in_its_space() -> None:
    problem = replace(fixing(pp=2, recompute="none", cp=1), recipe=find_recipe("nanotron"))
    assert {plan.schedule for plan in plans(problem)} == {"1f1b", "gpipe"}
    assert {plan.zero_stage for plan in plans(problem)} == {0, 1}
    problem = replace(fixing(recompute="none"), recipe=find_recipe("nanotron"))
    assert {shape.mesh.cp for shape in shapes(problem)} == {plan.mesh.dp_replicate for plan in plans(problem)} == {1}


@pytest.mark.parametrize(
    ("fixed", "feature"), [({"cp": 2}, "context parallelism"), ({"dp_replicate": 2}, "replicas of")]
)
def test_what_a_framework_does_not_have_is_refused_with_the_reason(fixed: dict[str, int], feature: str) -> None:
    settings: dict[str, Any] = {**fixed, **({"shard_optimizer": ("dp_shard",)} if "dp_replicate" in fixed else {})}
    problem = replace(fixing(recompute="none", tp=1, pp=1, **settings), recipe=find_recipe("nanotron"))
    assert plans(problem) == []
    assert f"nanotron has no {feature}" in explain_empty_space(problem)
