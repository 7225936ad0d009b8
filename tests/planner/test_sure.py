"""How sure a prediction is said to be: by the published runs that are most like it."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.hardware import DEVICES
from shardlab.planner.sure import FEW, ON_PROFILES, errors_of, known_errors
from shardlab.predict.recipe import recipes
from shardlab.published.rows import read_rows

RUNS = Path(__file__).parents[2] / "benchmarks" / "published_runs.json"


def test_every_row_names_a_recipe_and_a_device() -> None:
    assert {name for row in known_errors() for name in row.recipes} <= set(recipes())
    assert {row.device for row in known_errors()} <= set(DEVICES)
    assert all(0 <= row.mean <= row.worst for row in known_errors())


def test_no_row_has_more_runs_than_were_published() -> None:
    rows = [row for row in read_rows(RUNS) if row.get("framework")]
    for each in known_errors():
        if each.recipes != ("nanotron",):  # whose runs are elsewhere
            runs = [row for row in rows if (row["framework"],) == each.recipes]
            assert 0 < each.runs <= sum(row["hardware"].get("device") == each.device for row in runs)


def test_a_recipe_with_runs_of_its_own_takes_those() -> None:
    own = errors_of("megatron-core", "h100")
    assert (own.recipes, own.device) == (("megatron-core",), "h100")
    told = f"± {own.mean:.1%} over {own.runs} published runs of megatron-core on h100, each source left out of the fit"
    assert str(own).startswith(told)
    assert errors_of("nanotron", "h100").recipes == ("nanotron",)


def test_others_take_all_runs_on_the_device_and_name_whose_they_are() -> None:
    others = errors_of("shardlab", "h100")
    assert others.recipes == ("llm-foundry", "megatron-core", "nanotron")
    assert others.runs == sum(errors_of(name, "h100").runs for name in others.recipes)
    assert "of llm-foundry, megatron-core, nanotron on h100" in str(others)


@pytest.mark.parametrize(("recipe", "device"), [("nanogpt", "a100-40gb"), ("torchtitan", "h100-96gb")])
def test_few_runs_of_a_recipe_do_not_stand_alone(recipe: str, device: str) -> None:
    found = errors_of(recipe, device)
    assert recipe in found.recipes
    assert len(found.recipes) > 1
    assert found.runs >= FEW
    assert found.device == device


@pytest.mark.parametrize("device", ["h200", "tpu-v4"])
def test_few_runs_on_a_device_do_not_stand_alone_either(device: str) -> None:
    found = errors_of("torchtitan-2025", device)
    assert found.runs == sum(row.runs for row in known_errors())
    assert found.device == ""
    assert f"of {len(found.recipes)} recipes, each" in str(found)


def test_steps_on_a_measured_machine_are_of_no_recipe() -> None:
    assert str(ON_PROFILES) == "± 6.1% over 34 steps on two CPU cores, at most 19%"
