"""Settings of plans, and refusals of contradictory ones."""

from __future__ import annotations

import json
import pickle
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

import shardlab
from shardlab.language import Mesh, UserError
from shardlab.strategies import STRATEGIES, Plan
from shardlab.strategies.plan.plan import CUT_AXES, read_plan
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
        ({"reshard_after": "never"}, "reshard_after is 'never'; give one of layer, forward, stage, step"),
        ({"recompute": "some"}, "recompute is 'some'; give one of none, selective, full"),
        ({"stages_per_rank": 0}, "stages_per_rank is 0; give 1 or more"),
        ({"schedule": "1F1B"}, "there is no schedule '1F1B'; did you mean 1f1b?"),
        ({"schedule": "1f2b"}, "there is no schedule '1f2b'; did you mean 1f1b?"),
        ({"schedule": "tree"}, "there is no schedule 'tree'; there are gpipe, 1f1b, "),
        ({"passes": "defer,prefech"}, "there is no pass 'prefech'; did you mean prefetch?"),
        ({"passes": True}, 'passes is True; give names in quotes, such as "prefetch,bucket=4"'),
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
    ("mesh", "ranks", "expected"),
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
def test_data_parallel_axes_follow_the_number_of_ranks(mesh: Mesh, ranks: int, expected: Mesh) -> None:
    plan = Plan(mesh, shard_optimizer=("dp_shard",))
    assert plan.on(ranks) == replace(plan, mesh=expected)


def test_ranks_that_the_other_axes_do_not_divide_are_refused() -> None:
    with pytest.raises(UserError, match=r"pp 2 x dp_shard 2 x tp 2, .*: give a multiple of 4 ranks, not 6$"):
        Plan(Mesh(pp=2, dp_shard=2, tp=2)).on(6)


# Plans in TOML files.


WRITTEN_of_plan_file = """
schedule = "breadth-first"
stages_per_rank = 3
layers_per_stage = [1, 1, 1, 1, 1, 2]
shard_parameters = ["dp_shard"]
shard_optimizer = ["dp_shard", "dp_replicate"]
reshard_after = "stage"

[mesh]
pp = 2
dp_shard = 2
dp_replicate = 2
"""


def test_a_file_has_the_fields_of_a_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(WRITTEN_of_plan_file)
    assert read_plan(file) == Plan(
        Mesh(pp=2, dp_shard=2, dp_replicate=2),
        "breadth-first",
        3,
        (1, 1, 1, 1, 1, 2),
        shard_parameters=("dp_shard",),
        shard_optimizer=("dp_shard", "dp_replicate"),
        reshard_after="stage",
    )


def test_an_empty_file_is_one_device(tmp_path: Path) -> None:
    file = tmp_path / "plan.toml"
    file.write_text("")
    assert read_plan(file) == Plan()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("shedule = '1f1b'", "plan.toml has no 'shedule'; did you mean schedule?"),
        ("colour = 'red'", "plan.toml has no 'colour'; there are mesh, schedule"),
        ("mesh = 4", "mesh is 4; give a table"),
        ("mesh = { dpshard = 4 }", "mesh has no 'dpshard'; did you mean dp_shard?"),
        ("mesh = { pp = 0 }", "axis pp has 0 ranks"),
        ("mesh = { pp = '2' }", "pp is '2'; give a whole number"),
        ("mesh = { pp = true }", "pp is True; give a whole number"),
        ("stages_per_rank = 1.5", "stages_per_rank is 1.5; give a whole number"),
        ("layers_per_stage = ['a']", "layers_per_stage is ['a']; give a list of whole numbers"),
        ("shard_parameters = 'dp_shard'", "shard_parameters is 'dp_shard'; give a list of axes"),
        ("shard_optimizer = ['pp']", "shard_optimizer is ['pp']; give some of dp_shard, dp_replicate, cp, each once"),
        ("shard_optimizer = [1]", "shard_optimizer is [1]; give some of dp_shard, dp_replicate, cp, each once"),
        ("sequence_parallel = 1", "sequence_parallel is 1; give true or false"),
        ("context = 3", "context is 3; give one of ring, all_gather"),
        (
            "recompute = ['a']",
            "recompute is ['a']; give one of none, selective, full, per-op",
        ),
        ("schedule = 3", "schedule is 3; give a word in quotes or a Schedule"),
        ("recompute = 'half'", "recompute is 'half'; give one of none, selective, full"),
        ("mesh = ", "is not TOML: "),
    ],
)
def test_an_invalid_plan_file_is_refused_in_one_sentence_with_its_path(
    tmp_path: Path, text: str, sentence: str
) -> None:
    file = tmp_path / "plan.toml"
    file.write_text(text)
    with pytest.raises(UserError) as refused:
        read_plan(file)
    assert str(refused.value).startswith(f"{file}")
    assert sentence in str(refused.value)


def test_a_file_that_cannot_be_read_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read: No such file"):
        read_plan(tmp_path / "none.toml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        read_plan(tmp_path)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="cannot be read: it is not text"):
        read_plan(tmp_path / "bytes.toml")


def test_numbers_may_be_of_numpy_or_a_range() -> None:
    plan = Plan(Mesh(pp=2), stages_per_rank=cast(Any, np.int32(2)), layers_per_stage=cast(Any, list(np.arange(1, 5))))
    assert plan == Plan(Mesh(pp=2), stages_per_rank=2, layers_per_stage=(1, 2, 3, 4))
    assert {type(number) for number in (plan.stages_per_rank, *plan.layers_per_stage)} == {int}
    assert Plan(freeze=cast(Any, range(2))).freeze == (0, 1)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"tp": 4}, "Plan has no argument tp; give mesh=Mesh(tp=4)"),
        ({"shard_optimizers": ()}, "there is no argument 'shard_optimizers'; did you mean shard_optimizer?"),
    ],
)
def test_an_unknown_field_is_refused_in_one_sentence(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refusal:
        Plan(**settings)
    assert str(refusal.value) == sentence


ZERO_3 = dict.fromkeys(("shard_parameters", "shard_gradients", "shard_optimizer"), ("dp_shard",))


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"])
@pytest.mark.parametrize(
    ("base", "changes"),
    [
        *(({}, {name: (axis,)}) for name in ("shard_optimizer", "reduce_every_microbatch") for axis in CUT_AXES),
        ({}, {"reduce_every_microbatch": ("ep",)}),
        ({}, {"reduce_at": "step"}),
        (ZERO_3, {"reduce_at": "step"}),
        ({}, {"reshard_after": "step"}),
        (ZERO_3, {"reshard_after": "step"}),
        ({}, {"context": "all_gather"}),
        ({}, {"context": "ulysses"}),
    ],
)
def test_a_field_without_effect_is_one_that_changes_no_tape(base: Any, changes: Any, axis: str) -> None:
    plan = Plan(Mesh(**{axis: 2}), **base)
    changed = replace(plan, **changes)
    tapes, others = (shardlab.trace(variant, layers=3, microbatches=8).fingerprint() for variant in (plan, changed))
    assert (tapes == others) == bool(changes.keys() & changed.without_effect().keys())


def test_a_list_of_axes_is_as_good_as_a_tuple() -> None:
    axes: Any = ["dp_shard"]
    plan = Plan(Mesh(dp_shard=2), shard_parameters=axes, shard_gradients=axes, shard_optimizer=axes)
    assert plan == Plan(
        Mesh(dp_shard=2),
        shard_parameters=("dp_shard",),
        shard_gradients=("dp_shard",),
        shard_optimizer=("dp_shard",),
    )
    assert hash(plan)
