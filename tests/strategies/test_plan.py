"""What a plan says, and which plans are refused in a sentence."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from typing import Any

import pytest

from shardlab.program import Mesh, UserError
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.strategies.schedules.find import find_schedule


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"shard_parameters": ("tp",)}, "shard_parameters is tp; give some of dp_shard, dp_replicate, cp, each once"),
        ({"shard_optimizer": ("dp_shard", "dp_shard")}, "shard_optimizer is dp_shard, dp_shard; give some of"),
        ({"shard_parameters": ("dp_shard",)}, "let shard_optimizer begin with dp_shard"),
        (
            {"shard_optimizer": ("dp_replicate", "dp_shard"), "shard_gradients": ("dp_shard",)},
            "shard_gradients is dp_shard but shard_optimizer is dp_replicate, dp_shard",
        ),
        (
            {"shard_optimizer": ("dp_shard",), "shard_gradients": ("dp_shard",), "reduce_every_microbatch": ()},
            "shard_gradients is dp_shard but reduce_every_microbatch is nothing",
        ),
        ({"reshard_after": "never"}, "reshard_after is 'never'; give one of layer, stage, step"),
        ({"recompute": "some"}, "recompute is 'some'; give one of none, selective, full"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0; give 1 or more"),
        ({"passes": "defer,prefech"}, "there is no pass 'prefech'; did you mean prefetch?"),
        ({"passes": True}, "passes is True; give a word in quotes"),
        ({"sequence_parallel": True}, "sequence_parallel cuts sequences over tp, but the mesh has tp 1"),
    ],
)
def test_fields_that_do_not_fit_each_other_are_one_sentence(fields: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        Plan(**fields)
    assert sentence in str(refused.value)


@pytest.mark.parametrize(
    ("plan", "layers", "sentence"),
    [
        (Plan(Mesh(pp=4)), 3, "3 layers do not reach 4 pipeline stages"),
        (Plan(Mesh(pp=2), layers_per_stage=(1, 2)), 4, "layers_per_stage is 1, 2, but 4 layers are to be cut into 2"),
        (Plan(Mesh(pp=2), layers_per_stage=(4, 0)), 4, "give 2 numbers of 1 or more that add up to 4"),
        (Plan(Mesh(pp=2), "zb-v", stages_per_rank=3), 9, "zb-v has 2 stages on each rank, but stages_per_rank is 3"),
        (Plan(Mesh(pp=2), "1f2b"), 4, "there is no schedule '1f2b'; did you mean 1f1b?"),
    ],
)
def test_layers_that_do_not_fit_are_one_sentence(plan: Plan, layers: int, sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        plan.bounds(layers)
    assert sentence in str(refused.value)


def test_microbatches_must_divide_among_the_data_parallel_ranks() -> None:
    with pytest.raises(UserError, match="6 microbatches do not divide among 4 data-parallel ranks; give a multiple"):
        Plan(Mesh(dp_replicate=2, dp_shard=2)).steps(4, 6)


def test_layers_are_as_even_as_can_be_or_as_named() -> None:
    assert Plan(Mesh(pp=3)).bounds(8) == [0, 2, 5, 8]
    assert Plan(Mesh(pp=3), layers_per_stage=(1, 1, 6)).bounds(8) == [0, 1, 2, 8]
    assert Plan(Mesh(pp=2), "interleaved-1f1b").bounds(8) == [0, 2, 4, 6, 8]
    assert Plan(Mesh(pp=2), "interleaved-1f1b", stages_per_rank=4).bounds(8) == list(range(9))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_a_layer_for_each_stage_is_enough(name: str, ranks: int) -> None:
    plan = Plan(Mesh(pp=ranks), name)
    layers = plan.natural_layers()
    assert plan.bounds(layers) == list(range(layers + 1))
    assert plan.steps(layers, 3).stages == layers


def test_a_plan_by_name_is_the_same_in_every_process() -> None:
    for entry in STRATEGIES.values():
        if entry.plan is not None:
            plan = entry.plan(entry.ranks)
            assert pickle.loads(pickle.dumps(plan)) == plan
            assert entry.grid(entry.ranks) == plan.mesh


def test_a_plan_as_words_leaves_out_what_is_nothing() -> None:
    plan = Plan(Mesh(pp=2, dp_shard=3), SCHEDULES["gpipe"], shard_optimizer=("dp_shard",))
    assert plan.as_dict() == {
        "mesh": {"pp": 2, "dp_shard": 3},
        "schedule": "gpipe",
        "shard_optimizer": ["dp_shard"],
        "reshard_after": "layer",
        "reduce_at": "layer",
        "recompute": "none",
        "context": "ring",
    }


def test_a_schedule_that_is_an_object_needs_no_name() -> None:
    assert Plan(schedule=SCHEDULES["zb-h1"]).order is find_schedule("zb-h1")


WRITTEN = [
    Plan(),
    Plan(Mesh(pp=2, tp=2), "zb-h1", sequence_parallel=True, recompute=(0, 2), context="all_gather"),
    Plan(Mesh(pp=2), layers_per_stage=(1, 3), stages_per_rank=1, reshard_after="step", reduce_at="step"),
    Plan(Mesh(dp_shard=2), shard_optimizer=("dp_shard",), reduce_every_microbatch=(), recompute=()),
]


@pytest.mark.parametrize("plan", WRITTEN)
def test_a_plan_is_the_same_after_it_was_written_down(plan: Plan) -> None:
    assert Plan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


@pytest.mark.parametrize("name", [field.name for field in fields(Plan) if field.name != "mesh"])
def test_every_field_refuses_what_is_of_no_type_that_it_has(name: str) -> None:
    with pytest.raises(UserError, match=f"^{name} is {{'a': 1}}; give "):
        Plan(**{name: {"a": 1}})  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("before", "ranks", "after"),
    [
        (Mesh(dp_shard=4), 2, Mesh(dp_shard=2)),
        (Mesh(dp_shard=4), 1, Mesh()),
        (Mesh(dp_shard=2), 4, Mesh(dp_shard=4)),
        (Mesh(dp_replicate=4), 3, Mesh(dp_replicate=3)),
        (Mesh(dp_replicate=4, dp_shard=2), 4, Mesh(dp_replicate=2, dp_shard=2)),
        (Mesh(dp_replicate=2, dp_shard=4), 6, Mesh(dp_shard=6)),
        (Mesh(pp=2, dp_shard=2, tp=2), 4, Mesh(pp=2, tp=2)),
    ],
)
def test_data_parallel_axes_follow_the_number_of_ranks(before: Mesh, ranks: int, after: Mesh) -> None:
    plan = Plan(before, shard_optimizer=("dp_shard",))
    assert plan.on(ranks) == replace(plan, mesh=after)


def test_ranks_that_the_other_axes_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"pp 2 x dp_shard 2 x tp 2, .*: give a multiple of 4 ranks, not 6$"):
        Plan(Mesh(pp=2, dp_shard=2, tp=2)).on(6)
