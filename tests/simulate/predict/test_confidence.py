"""How sure predictions are: by the measured runs whose steps are most like them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlab.language import Mesh
from shardlab.models.named import find_model
from shardlab.simulate.hardware import DEVICES, find_cluster
from shardlab.simulate.predict import confidence as module
from shardlab.simulate.predict.confidence import (
    AXES,
    FEW,
    ON_PROFILES,
    OTHER_DEVICE,
    OTHER_MODEL,
    Confidence,
    Figure,
    Kind,
    RunErrors,
    confidence,
    first_sight,
    may_not_fit,
    measured_runs,
    memory_margin,
    nearest,
)
from shardlab.simulate.predict.recipe import OWN, find_recipe, recipes

RUNS = Path(__file__).parents[3] / "benchmarks" / "published_runs.json"

DENSE = Kind(("megatron-core-tuned",), frozenset(), "h100", False, frozenset({"tp", "pp"}), 8192)


def kind_of(recipe: str = "megatron-core-tuned", device: str = "h100", **changes: object) -> Kind:
    named_recipe = find_recipe(recipe)
    return replace(DENSE, recipe=(named_recipe.name, *named_recipe.bases), device=device, **changes)


kinds = st.builds(
    Kind,
    recipe=st.sampled_from([(name, *recipe.bases) for name, recipe in recipes().items()]),
    switches=st.frozensets(st.sampled_from(["attention=flash2", "tp_overlap=off"])),
    device=st.sampled_from(sorted(DEVICES)),
    mixture=st.booleans(),
    axes=st.none() | st.frozensets(st.sampled_from(AXES)),
    seq_len=st.sampled_from([512, 2048, 8192, 131072]),
)


def test_every_row_names_a_recipe_a_device_and_an_error() -> None:
    for row in (*measured_runs(), *first_sight()):
        assert row.recipe in recipes()
        assert row.device in DEVICES
        assert set(row.axes) <= set(AXES)
        assert row.time or row.memory


def test_no_publisher_has_more_rows_than_it_published() -> None:
    rows = cast(list[dict[str, str]], json.loads(RUNS.read_text(encoding="utf-8")))
    for publisher in {row["publication"] for row in rows}:
        publisher_rows = [row for row in measured_runs() if row.publisher == publisher]
        assert sum(len(row.time) for row in publisher_rows) <= sum(row["publication"] == publisher for row in rows)


def test_publishers_of_first_predictions_are_called_as_those_of_their_runs() -> None:
    assert {row.publisher for row in first_sight()} <= {row.publisher for row in measured_runs()}


def test_runs_of_the_same_kind_stand_alone() -> None:
    result = confidence(kind_of(), "time")
    assert result.devices == ("h100",)
    assert set(result.recipes) <= {"megatron-core-tuned", "megatron-core"}
    assert str(result).startswith(f"time ± {result.mean:.1%}, at most {result.worst:.0%}")
    assert str(result).endswith(f"{result.runs} runs of {', '.join(result.recipes)} on h100, publisher left out")
    assert not result.unmeasured


@given(kinds, st.sampled_from(["time", "memory"]))
def test_a_kind_has_runs_of_its_own_model_and_as_many_as_stand_alone(kind: Kind, figure: Figure) -> None:
    near = nearest(measured_runs(), kind, figure)
    count = sum(len(row.errors(figure)) for row in near)
    same_model = [row for row in measured_runs() if row.errors(figure) and row.mixture == kind.mixture]
    if same_model:
        assert all(row.mixture == kind.mixture for row in near)
    assert count >= min(FEW, sum(len(row.errors(figure)) for row in same_model))
    farthest = max(row.distance(kind) for row in near)
    nearer = [row for row in measured_runs() if row.errors(figure) and row.distance(kind) < farthest]
    assert all(row in near for row in nearer)


@given(kinds, st.sampled_from(["time", "memory"]))
def test_the_expected_error_is_between_the_mean_and_the_worst_unless_first_predictions_were_worse(
    kind: Kind, figure: Figure
) -> None:
    result = confidence(kind, figure)
    assert abs(result.bias) <= result.mean + 1e-12
    assert result.mean <= result.worst
    assert result.error == max(result.mean, result.at_least)
    assert str(result).startswith(f"{figure} ± {result.error:.1%}")


def test_a_mixture_is_never_as_sure_as_a_dense_model() -> None:
    assert OTHER_MODEL > 2 * OTHER_DEVICE
    dense = RunErrors("someone", "megatron-core-tuned", "h100", 8192, axes=("tp", "pp"), time=(0.01,) * FEW)
    mixture = RunErrors("other", "fsdp2", "h200", 512, mixture=True, time=(-0.6,))
    assert nearest([dense, mixture], replace(DENSE, mixture=True), "time") == [mixture]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (kind_of("shardlab"), "shardlab has never run on several GPUs"),
        (kind_of(device="mi355x"), "no run on mi355x is known"),
        (kind_of("zero-bubble", "a100-80gb", axes=frozenset({"cp"})), "no run of zero-bubble with cp"),
        (kind_of("zero-bubble", "a100-80gb", mixture=True), "no run of zero-bubble of a mixture of experts"),
        (kind_of("zero-bubble"), "no run of zero-bubble on h100"),
        (
            kind_of("zero-bubble", "a100-80gb", seq_len=131072),
            "no run of zero-bubble with sequences of more than ",
        ),
    ],
)
def test_what_nobody_measured_is_named(kind: Kind, words: str) -> None:
    assert words in str(confidence(kind, "time"))


def test_without_a_run_of_the_recipe_on_the_device_first_predictions_count() -> None:
    result = confidence(kind_of(device="mi355x"), "time")
    assert result.error == result.at_least > result.mean
    assert str(result).startswith(f"time ± {result.error:.1%} as for new publishers: no run on mi355x is known; ")
    assert confidence(kind_of(), "time").at_least == 0


def test_what_a_single_publisher_measured_is_as_sure_as_a_first_prediction() -> None:
    result = confidence(kind_of("zero-bubble", "a100-80gb", axes=frozenset({"pp"}), seq_len=1024), "time")
    assert len(result.publishers) == 1
    assert result.error == result.at_least
    assert f"only {result.publishers[0]} measured it" in str(result)


@pytest.mark.parametrize("figure", ["time", "memory"])
def test_what_is_stated_without_a_publisher_is_near_the_errors_of_its_first_predictions(figure: Figure) -> None:
    actual, stated = list[float](), list[float]()
    for row in first_sight():
        kind = kind_of(row.recipe, row.device, mixture=row.mixture, axes=frozenset(row.axes), seq_len=row.seq_len)
        actual += [abs(error) for error in row.errors(figure)]
        stated += [confidence(kind, figure, left_out_publisher=row.publisher).error] * len(row.errors(figure))
    assert 0.65 < mean(stated) / mean(actual) < 1.5


def test_a_recipe_of_a_user_is_like_its_base(tmp_path: Path) -> None:
    file = tmp_path / "ours.toml"
    file.write_text('base = "megatron-core-tuned"\nsource = "our branch"\n')
    ours = find_recipe(str(file))
    kind = replace(DENSE, recipe=(ours.name, *ours.bases))
    result = confidence(kind, "time")
    assert "megatron-core-tuned" in result.recipes
    assert "no run of ours is known" in str(result)


def test_the_kind_of_a_step_has_the_axes_with_several_ranks() -> None:
    class Step:
        mesh, model, cluster, recipe = Mesh(tp=2, dp_shard=8), find_model("mixtral-8x7b"), find_cluster("h100x16"), OWN

    kind = Kind.of(Step())
    assert (kind.axes, kind.mixture, kind.device) == (frozenset({"tp"}), True, "h100")


def test_a_margin_is_the_error_of_memory_up_to_a_limit() -> None:
    cluster, model = find_cluster("a100x8"), find_model("gpt2-xl")
    for name, recipe in recipes().items():
        margin = memory_margin(recipe, cluster, model) / cluster.device.memory
        error = confidence(Kind.of_problem(recipe, cluster, model), "memory").error
        recipe_margin = recipe.memory.margin_bytes / cluster.device.memory
        assert margin == pytest.approx(max(recipe_margin, min(module.MOST_MARGIN, error))), name


def test_a_step_may_not_fit_if_less_is_free_than_the_error_of_its_memory() -> None:
    memory = 70.0 * 2**30, 80.0 * 2**30
    small_error = Confidence("memory", 9, 0.10, 0.3, -0.1, "9 runs")
    assert may_not_fit([small_error], *memory) == ""
    large_error = replace(small_error, mean=0.2)
    words = "may not fit: 10.0 GiB are free, and the expected error of memory is 14.0 GiB"
    assert may_not_fit([large_error], *memory) == words
    assert may_not_fit([ON_PROFILES], *memory) == ""


def test_steps_on_a_measured_machine_are_of_no_recipe() -> None:
    assert str(ON_PROFILES) == "time ± 6.1%, at most 19%: 34 steps on two CPU cores"
