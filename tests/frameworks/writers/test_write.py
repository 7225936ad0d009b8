"""Plans that are written as files of a framework, and read again as `explain` reads them."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from shardlab.common.errors import UserError
from shardlab.frameworks.find import read_config, read_run
from shardlab.frameworks.writers.translation import model_properties
from shardlab.frameworks.writers.write import (
    FRAMEWORK_OF_RECIPE,
    WRITERS,
    Written,
    framework_of,
    plan_properties,
    write_step,
)
from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.models.named import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe, recipes
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

EVERYTHING = ("shard_parameters", "shard_gradients", "shard_optimizer")


COMPILED = {"attention": "flash2", "loss": "compiled"}
"""Switches of torchtitan as its TOML files say them."""


def step_of(
    plan: Plan, recipe: str, model: str = "llama3-8b", precision: str = "bf16-fp32-grads", **switches: str
) -> Workload:
    cluster, numbers = find_cluster(f"h100x{plan.mesh.world}"), find_precision(precision)
    microbatches = 2 * plan.data_ranks * plan.mesh.pp
    return Workload(plan, find_model(model), cluster, microbatches, 1, numbers, recipe=find_recipe(recipe, switches))


def sharded(stage: int, **axes: int) -> dict[str, Any]:
    over = tuple(axis for axis in ("dp_shard", "cp") if axes.get(axis, 1) > 1)
    return dict.fromkeys(EVERYTHING[3 - stage :], over)


def write(folder: Path, written: Written) -> Path:
    for name, text in written.texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder / next(iter(written.texts))


def require_same(step: Workload, file: Path, written: Written, model: str) -> None:
    """The file has no key that is unknown, and means the step but for what is not said."""
    config = read_config(str(file))
    assert config.unknown == []
    assert all(f"cannot be said here: {each}"[:60] in file.read_text(encoding="utf-8") for each in written.unsaid)
    if written.unsaid:
        return
    back = read_run(config, step.cluster).workload
    assert isinstance(step.plan, Plan)
    assert isinstance(back.plan, Plan)
    assert plan_properties(back, back.plan) == plan_properties(step, step.plan)
    assert (back.micro_batch_size, back.microbatches) == (step.micro_batch_size, step.microbatches)
    assert back.precision.name == step.precision.name
    assert model_properties(back.model) == model_properties(find_model(model))


axes = {
    "dp_shard": st.sampled_from([1, 2, 4, 8]),
    "tp": st.sampled_from([1, 2, 4]),
    "cp": st.sampled_from([1, 2]),
    "pp": st.sampled_from([1, 2, 4]),
}


@st.composite
def torchtitan_plans(draw: st.DrawFn) -> Plan:
    """Plans that torchtitan can run: FSDP over dp_shard and cp, and pipelines that keep gathered weights."""
    mesh = {name: draw(sizes) for name, sizes in axes.items()}
    assume(mesh["dp_shard"] * mesh["cp"] > 1)
    piped, looped = mesh["pp"] > 1, draw(st.booleans())
    keeps = piped or draw(st.booleans())
    fields = sharded(3, **mesh)
    if keeps:
        fields.pop("shard_gradients")
    every = draw(st.sampled_from([2, 4]))
    return Plan(
        Mesh(**mesh, dp_replicate=1 if piped else draw(st.sampled_from([1, 2]))),
        "interleaved-1f1b" if piped and looped else "1f1b",
        stages_per_rank=draw(st.sampled_from([2, 4])) if piped and looped else None,
        reshard_after="step" if keeps else "layer",
        sequence_parallel=mesh["tp"] > 1,
        recompute=draw(st.sampled_from(["none", "full", tuple(range(every - 1, 32, every))])),
        context=draw(st.sampled_from(["all_gather", "ring"])),
        **fields,
    )


@st.composite
def megatron_plans(draw: st.DrawFn) -> Plan:
    """Plans that Megatron-LM can run: its distributed optimizer or none, and pipelines of equal stages."""
    mesh = {name: draw(sizes) for name, sizes in axes.items()}
    piped, looped = mesh["pp"] > 1, draw(st.booleans())
    stage = draw(st.sampled_from([0, 1])) if mesh["dp_shard"] * mesh["cp"] > 1 else 0
    stages = mesh["pp"] * (virtual := 2 if piped and looped else 1)
    count = draw(st.integers(1, 32 // stages - 1)) if 32 // stages > 1 else 0
    some = tuple(block for block in range(32) if block % (32 // stages) < count)
    return Plan(
        Mesh(**mesh),
        "interleaved-1f1b" if virtual > 1 else "1f1b",
        stages_per_rank=virtual if virtual > 1 else None,
        reduce_at=draw(st.sampled_from(["layer", "step"])),
        sequence_parallel=mesh["tp"] > 1 and draw(st.booleans()),
        recompute=draw(st.sampled_from(["none", "full", some] if some else ["none", "full"])),
        context=draw(st.sampled_from(["all_gather", "ring", "ulysses"])),
        **sharded(stage, **mesh),
    )


SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
slow = settings(deadline=None, max_examples=40, suppress_health_check=SUPPRESSED)


@slow
@given(torchtitan_plans(), st.sampled_from(["compiled", "float32"]), st.sampled_from(["on", "off"]))
def test_a_plan_of_torchtitan_is_read_as_it_was_written(tmp_path: Path, plan: Plan, loss: str, tp: str) -> None:
    step = step_of(plan, "torchtitan", attention="flash2", loss=loss, async_tp=tp if plan.mesh.tp > 1 else "off")
    written = write_step(step, "llama3-8b")
    assert written.unsaid == ()
    require_same(step, write(tmp_path, written), written, "llama3-8b")


@slow
@given(megatron_plans(), st.sampled_from(["llama3-8b", "mixtral-8x7b"]), st.sampled_from(["bf16", "bf16-fp32-grads"]))
def test_a_plan_of_megatron_is_read_as_it_was_written(tmp_path: Path, plan: Plan, model: str, precision: str) -> None:
    gradients = "bf16" if precision == "bf16" else "fp32"
    early = "on" if plan.reduce_at == "layer" else "off"
    step = step_of(plan, "megatron-core", model, precision, gradients=gradients, dp_overlap=early)
    written = write_step(step, model)
    if model == "llama3-8b":
        assert written.unsaid == ()
    require_same(step, write(tmp_path, written), written, model)


@pytest.mark.parametrize("name", [name for name in recipes() if name in FRAMEWORK_OF_RECIPE])
def test_what_cannot_be_said_stands_in_a_comment_of_every_file(name: str, tmp_path: Path) -> None:
    plan = Plan(Mesh(dp_shard=4, pp=4), "zb-h2", shard_optimizer=("dp_shard",), recompute="selective")
    step = step_of(plan, name)
    written = write_step(step, "llama3-8b")
    assert any("schedule" in each for each in written.unsaid)
    require_same(step, write(tmp_path, written), written, "llama3-8b")


def test_a_model_that_is_no_flavor_is_left_to_the_user(tmp_path: Path) -> None:
    step = step_of(Plan(Mesh(dp_shard=8), **sharded(3, dp_shard=8)), "torchtitan", "gpt2")
    written = write_step(step, "gpt2")
    assert written.unsaid[0].startswith("the model, which is none of torchtitan's flavors")
    assert "flavor =" not in write(tmp_path, written).read_text()


def test_a_recipe_of_a_users_file_is_written_as_its_base(tmp_path: Path) -> None:
    (tmp_path / "ours.toml").write_text('base = "megatron-core"\nsource = "our branch"\n')
    assert framework_of(find_recipe(str(tmp_path / "ours.toml"))) == "megatron"
    with pytest.raises(UserError, match="no framework's files are written for recipe shardlab; give a recipe such as"):
        framework_of(find_recipe("shardlab"))


def test_uneven_stages_are_said_where_a_framework_has_words_for_them(tmp_path: Path) -> None:
    common: dict[str, Any] = {"shard_optimizer": ("dp_shard",), "reduce_at": "step"}
    plan = Plan(Mesh(dp_shard=2, pp=4), layers_per_stage=(7, 9, 9, 7), **common)
    written = write_step(step_of(plan, "megatron-core"), "llama3-8b")
    assert written.unsaid == ()
    assert "--decoder-first-pipeline-num-layers 7" in written.texts["train.sh"]
    plan = replace(plan, mesh=Mesh(dp_shard=2, pp=2), layers_per_stage=(20, 12))
    written = write_step(step_of(plan, "megatron-core"), "llama3-8b")
    assert written.unsaid == ()
    keeps: dict[str, Any] = {
        "shard_parameters": ("dp_shard",),
        "shard_optimizer": ("dp_shard",),
        "reshard_after": "step",
    }
    plan = Plan(Mesh(dp_shard=2, pp=2), layers_per_stage=(20, 12), **keeps)
    written = write_step(step_of(plan, "torchtitan", **COMPILED), "llama3-8b")
    assert written.unsaid == ()
    assert 'pipeline_parallel_split_points = ["layers.20"]' in written.texts["train.toml"]


def test_every_writer_has_a_recipe() -> None:
    assert set(FRAMEWORK_OF_RECIPE.values()) == set(WRITERS)
    assert set(FRAMEWORK_OF_RECIPE) <= set(recipes())


# The framework's own configuration code, where it is installed without what it needs to train:
# pip install --no-deps "torchtitan<0.3"


def test_torchtitan_itself_takes_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec("torchtitan")
    if found is None or not found.submodule_search_locations:
        pytest.skip("torchtitan is not installed")
    package = types.ModuleType("torchtitan")  # without its __init__, which imports triton
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "torchtitan", package)
    config = importlib.import_module("torchtitan.config")
    if not hasattr(config, "JobConfig"):
        pytest.skip("this torchtitan takes no TOML files")
    plan = Plan(Mesh(dp_shard=2, tp=2, pp=2), recompute="full", sequence_parallel=True, **sharded(1, dp_shard=2))
    file = write(tmp_path, write_step(step_of(plan, "torchtitan", **COMPILED), "llama3-8b"))
    job = config.ConfigManager().parse_args(["--job.config_file", str(file)])
    assert (job.parallelism.tensor_parallel_degree, job.parallelism.pipeline_parallel_degree) == (2, 2)
    assert (job.model.name, job.model.flavor, job.activation_checkpoint.mode) == ("llama3", "8B", "full")
