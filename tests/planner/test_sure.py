"""How sure a prediction is said to be: by the published runs that are most like it."""

from __future__ import annotations

from shardlab.hardware import DEVICES
from shardlab.planner.sure import errors_of, known_errors
from shardlab.predict.recipe import recipes


def test_every_row_names_a_recipe_and_a_device() -> None:
    assert {row.recipe for row in known_errors()} <= set(recipes())
    assert {row.device for row in known_errors()} <= set(DEVICES)
    assert all(0 <= row.mean <= row.worst for row in known_errors())


def test_the_most_alike_runs_are_taken() -> None:
    own = errors_of("megatron-core", "h100")
    assert (own.recipe, own.device) == ("megatron-core", "h100")
    assert str(own).startswith(f"± {own.mean:.1%} over {own.runs} published runs of megatron-core on h100")
    others = errors_of("shardlab", "h100")
    assert (others.recipe, others.device) == ("", "h100")
    assert others.runs > own.runs
    assert errors_of("shardlab", "tpu-v4").runs == sum(row.runs for row in known_errors())
