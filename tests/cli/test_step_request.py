"""Requests of a step on a cluster: what options leave out, and the global batch, which is as large for every plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import command_of, main
from shardlab.cli.step_request import StepRequest, default_precision
from shardlab.common.files import as_toml
from shardlab.language import UserError
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.train.config import BatchConfig

Captured = pytest.CaptureFixture[str]

JOB = """
[model]
model = "gpt"
layers = 2

[cluster]
cluster = "h100x2"

[batch]
global_batch = 8
micro_batch_size = 2

[plan]
mesh = { dp_shard = 2 }
shard_optimizer = ["dp_shard"]
"""

NARROW = ("--max-pp", "1", "--max-cp", "1")
"""Limits of a short search."""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A job file."""
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def test_switches_of_flags_go_before_those_of_the_job(tmp_path: Path) -> None:
    recipe, job = tmp_path / "ours.toml", tmp_path / "switched.toml"
    values = "\n".join(
        f'[switches.{name}]\ndefault = "off"\nvalues.off.source = "code"\nvalues.on.source = "code"' for name in "ab"
    )
    recipe.write_text(f'source = "our code"\n{values}')
    job.write_text(f'[cluster]\nrecipe = "{recipe}"\nswitches = {{ a = "on", b = "on" }}\n')
    asked = StepRequest.of(command_of(["simulate", "--config", str(job), "--switch", "b=off"]))
    assert asked.found_recipe.changed_switches == {"a": "on"}
    with pytest.raises(UserError, match=r"--switch a is no switch; give NAME=VALUE, such as attention=flash2"):
        StepRequest.of(command_of(["simulate", "--config", str(job), "--switch", "a"]))
    with pytest.raises(UserError, match=r"--switch gives a twice"):
        StepRequest.of(command_of(["simulate", "--config", str(job), "--switch", "a=on", "a=off"]))


@pytest.mark.parametrize(
    ("recipe", "device", "precision"),
    [
        ("shardlab", "h100", "bf16"),
        ("shardlab", "v100", "fp32"),
        ("torchtitan", "h100", "bf16-fp32-grads"),  # FSDP2 reduces gradients in float32
        ("torchtitan", "v100", "fp32"),
        ("megatron-core-tuned", "a100", "bf16"),
        ("megatron-core", "a100", "bf16-fp32-grads"),
        ("megatron-2021", "a100", "bf16-fp32-grads"),  # --bf16 sums gradients in float32
        ("nanotron", "h100", "bf16-fp32-grads"),
    ],
)
def test_the_recipe_and_the_device_determine_the_default_precision(recipe: str, device: str, precision: str) -> None:
    assert default_precision(find_recipe(recipe), find_cluster(f"{device}x1").device).name == precision
    request = StepRequest("gpt2", f"{device}x1", recipe=recipe)
    assert [candidate.name for candidate in request.precisions] == [precision]


@pytest.mark.thorough  # tests/cli/plan/test_command.py has two recipes
@pytest.mark.parametrize("recipe", ["shardlab", "torchtitan", "megatron-core"])
def test_the_command_of_a_plan_reproduces_its_time_and_memory(recipe: str, capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", "--cluster", "h100x8", "--recipe", recipe, *NARROW, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    assert main([*choice["commands"]["simulate"].split()[1:], "--json"]) == 0
    simulated, chosen = json.loads(capsys.readouterr().out), choice["chosen"]
    assert simulated["step_seconds"] == pytest.approx(chosen["step_seconds"], rel=1e-9)
    assert simulated["memory_held"] == pytest.approx(chosen["memory"], rel=1e-9)


# Job files: the same tables for every command; flags override them.

STEP = ("--model", "llama3-8b", "--layers", "4", "--sequence", "2048", "--cluster", "h100x8", "--recipe", "nanotron")
BATCH = ("--memory", "60GiB", "--global-batch", "32", "--micro-batch-size", "2", "--precision", "bf16")
MESH = ("--dp-shard", "4", "--tp", "2", "--shard-optimizer", "dp_shard", "--optimizer", "muon")


def simulated(capsys: Captured, *words: str) -> dict[str, Any]:
    status = main(["simulate", *words, "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return json.loads(captured.out)


def test_a_written_job_is_the_step_of_its_flags(tmp_path: Path, capsys: Captured) -> None:
    flags = command_of(["simulate", *STEP, *BATCH, *MESH])
    request = StepRequest.of(flags)
    entry, ranks = request.entry()
    assert entry.plan is not None
    (tmp_path / "job.toml").write_text(as_toml(request.as_tables(entry.plan(ranks), "bf16", 32, 2)))
    of_flags = simulated(capsys, *STEP, *BATCH, *MESH)
    assert simulated(capsys, "--config", str(tmp_path / "job.toml")) == of_flags
    assert of_flags["micro_batch_size"] == 2


@pytest.mark.parametrize(
    ("recipe", "flags", "recompute"),
    [
        ("torchtitan", (), "per-op"),
        ("torchtitan", ("--recompute", "none"), "none"),
        ("torchtitan", ("--recompute", "full"), "full"),
        ("fsdp2", (), "none"),
        ("maxtext", (), "full"),
        ("maxtext", ("--recompute", "minimal"), "minimal"),
        ("shardlab", (), "none"),
    ],
)
def test_what_is_recomputed_is_the_framework_s_default_unless_it_is_said(
    recipe: str, flags: tuple[str, ...], recompute: str
) -> None:
    flags = ("--model", "gpt2", "--cluster", "h100x8", "--recipe", recipe, "--dp-shard", "4", *flags)
    entry, ranks = StepRequest.of(command_of(["simulate", *flags])).entry()
    assert entry.plan is not None
    assert entry.plan(ranks).recompute == recompute


@pytest.mark.parametrize(
    ("recipe", "flags", "sharded"),
    [
        ("torchtitan", (), ("parameters", "gradients", "optimizer")),
        ("torchtitan", ("--pp", "2"), ("parameters", "optimizer")),
        ("maxtext", (), ("parameters", "gradients", "optimizer")),
        ("colossalai", (), ()),
        ("torchtitan", ("--shard-optimizer", "dp_shard"), ("optimizer",)),
        ("megatron-core-tuned", (), ("optimizer",)),
        ("shardlab", (), ()),
    ],
)
def test_data_parallel_ranks_share_what_the_framework_shares_by_default(
    recipe: str, flags: tuple[str, ...], sharded: tuple[str, ...]
) -> None:
    flags = ("--model", "gpt2", "--cluster", "h100x8", "--recipe", recipe, "--dp-shard", "4", *flags)
    entry, ranks = StepRequest.of(command_of(["simulate", *flags])).entry()
    assert entry.plan is not None
    plan = entry.plan(ranks)
    shared = [name for name in ("parameters", "gradients", "optimizer") if getattr(plan, f"shard_{name}")]
    assert shared == list(sharded)
    assert plan.reshard_after == ("step" if "--pp" in flags else "layer")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ((), {"layers": 2, "global_batch": 8, "micro_batch_size": 2, "precision": "bf16"}),
        (("--micro-batch-size", "4"), {"global_batch": 8, "micro_batch_size": 4, "microbatches": 2}),
        (("--microbatches", "8"), {"global_batch": 8, "micro_batch_size": 1}),
        (("--global-batch", "16"), {"global_batch": 16, "micro_batch_size": 2}),
        (("--model", "gpt2"), {"model": "gpt2", "layers": 14, "global_batch": 8}),
        (("--layers", "3"), {"model": "gpt", "layers": 3}),
        (("--recipe", "nanotron"), {"recipe": "nanotron", "precision": "bf16-fp32-grads"}),
        (("--cluster", "v100x4", "--dp-shard", "4"), {"cluster": "v100x4", "ranks": 4, "precision": "fp32"}),
        (("zero-3",), {"strategy": "zero-3", "ranks": 2}),
    ],
)
def test_flags_override_a_job(flags: tuple[str, ...], expected: dict[str, Any], job: Path, capsys: Captured) -> None:
    report = simulated(capsys, *flags, "--config", str(job))
    assert {name: report[name] for name in expected} == expected


def test_a_recipe_completes_a_plan_by_flags_but_not_the_plan_of_a_job(job: Path, capsys: Captured) -> None:
    job.write_text(job.read_text().replace('shard_optimizer = ["dp_shard"]', ""))
    words = ("--config", str(job), "--recipe", "megatron-core-tuned")  # which has ZeRO-1 at least
    assert "shard_optimizer" not in simulated(capsys, *words)["plan"]
    of_flags = simulated(capsys, *words, "--dp-shard", "2", "--tp", "1")
    assert of_flags["plan"]["shard_optimizer"] == ["dp_shard"]


def test_a_job_without_a_cluster_is_simulated_in_unit_costs(job: Path, capsys: Captured) -> None:
    job.write_text(job.read_text().replace('cluster = "h100x2"', ""))
    report = simulated(capsys, "--config", str(job))
    assert "end" in report
    assert [report[name] for name in ("layers", "ranks", "microbatches")] == [2, 2, 4]
    assert report["plan"]["shard_optimizer"] == ["dp_shard"]


@pytest.mark.parametrize(
    ("layers", "sentence"), [('"two"', "layers is 'two'; give a whole number"), ("0", "layers is 0")]
)
def test_layers_of_a_job_are_a_count_in_unit_costs_too(layers: str, sentence: str, job: Path, capsys: Captured) -> None:
    job.write_text(f"[model]\nlayers = {layers}\n[plan]\nmesh = {{ dp_shard = 2 }}\n")
    assert main(["simulate", "--config", str(job)]) == 2
    assert capsys.readouterr().err.startswith(f"shardlab: {sentence}")


def test_a_plan_may_be_the_table_of_a_job(job: Path, capsys: Captured) -> None:
    assert simulated(capsys, "--plan", str(job))["plan"]["shard_optimizer"] == ["dp_shard"]
    job.write_text('[plan]\nstrategy = "ddp"\n')
    assert main(["simulate", "--plan", str(job)]) == 2
    assert f"names a strategy but has no fields of a plan; give it as --config {job}" in capsys.readouterr().err


def test_training_divides_the_batch_of_a_job(job: Path, capsys: Captured) -> None:
    for flags, microbatches, micro_batch_size in ((), 4, 2), (("--micro-batch-size", "4"), 2, 4):
        main(["train", "--config", str(job), *flags, "--print-config", "--json"])
        train = json.loads(capsys.readouterr().out)["train"]
        assert (train["microbatches"], train["micro_batch_size"]) == (microbatches, micro_batch_size)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[clusters]", "a configuration has no 'clusters'; did you mean cluster?"),
        (
            "[cluster]\nname = 'h100x8'",
            "cluster has no 'name'; there are cluster, recipe, switches, memory, other_machine",
        ),
        ("[cluster]\nmemory = 72", 'cluster.memory is 72; give a size in quotes, such as "72GiB"'),
        ("[batch]\nglobal_batch = 0", "batch.global_batch is 0; give 1 or more"),
        ("[batch]\nsize = 3", "batch has no 'size'; there are global_batch, microbatches, micro_batch_size"),
        ("[plan]\nstrategy = 3", "plan.strategy is 3; give a name in quotes"),
        ("[plan]\nranks = 'x'\nmesh = { dp_shard = 2 }", "plan.ranks is 'x'; give a whole number"),
        ("[model]\nmodel = 3", "model.model is 3; give a name in quotes"),
        ("[plan]\nmash = {}", "plan has no 'mash'; did you mean mesh?"),
        ("cluster = 'h100x8'", "cluster is 'h100x8'; give a table"),
        ("schedule = '1f1b'", "a configuration has no 'schedule'; write it below [plan], or give the file as"),
    ],
)
@pytest.mark.parametrize("command", ["simulate", "verify", "train"])
def test_what_a_job_cannot_have_is_refused_in_a_sentence(
    command: str, text: str, sentence: str, job: Path, capsys: Captured
) -> None:
    job.write_text(text)
    assert main([command, "--config", str(job)]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"shardlab: {job}: {sentence}")
    assert captured.err.count("\n") == 1


# A priced step's global batch: as large for every plan on a cluster, and cut as the options say.


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (BatchConfig(), (16, 1)),
        (BatchConfig(micro_batch_size=4), (16, 4)),
        (BatchConfig(microbatches=8), (8, 1)),
        (BatchConfig(microbatches=8, micro_batch_size=2), (8, 2)),
        (BatchConfig(global_batch=64), (64, 1)),
        (BatchConfig(global_batch=64, micro_batch_size=2), (32, 2)),
        (BatchConfig(global_batch=64, microbatches=16), (16, 4)),
        (BatchConfig(global_batch=64, microbatches=32, micro_batch_size=2), (32, 2)),
    ],
)
def test_a_global_batch_is_cut_into_microbatches(request_: BatchConfig, expected: tuple[int, int]) -> None:
    assert request_.cut(16, 8) == expected


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            BatchConfig(global_batch=25, micro_batch_size=3),
            "25 sequences cannot be cut into microbatches of 3 sequences; give a mult",
        ),
        (BatchConfig(global_batch=25, microbatches=8), "cannot be cut into 8 microbatches; give a multiple of 8"),
        (BatchConfig(global_batch=4, microbatches=8), "cannot be cut into 8 microbatches; give a multiple of 8"),
        (BatchConfig(25, 8, 2), "cut into 8 microbatches of 2 sequences; leave out one of the three"),
        (
            BatchConfig(),
            r"16 sequences \(a microbatch .* 16 devices\) does not divide among 3 .*--global-batch 15 or 18",
        ),
        (
            BatchConfig(global_batch=8, micro_batch_size=4),
            "in microbatches of 4, does not divide among 3 .*; give --global-batch 12",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_in_a_sentence(request_: BatchConfig, said: str) -> None:
    with pytest.raises(UserError, match=said):
        request_.cut(16, 3)


def test_every_plan_on_a_cluster_takes_as_many_tokens_by_default(capsys: Captured) -> None:
    """Plans of any axes, and programs of their own."""
    for layout in ("ddp", "zero-3", "--pp 4 --dp-shard 2", "--tp 4 --dp-shard 2", "--pp 8", "--dp-shard 4", "single"):
        command = ["simulate", *layout.split(), "--model", "gpt2", "--layers", "8", "--cluster", "h100x8", "--json"]
        assert main(command) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["global_batch"], printed["tokens"]) == (8, 8 * 1024), layout


def test_the_global_batch_is_printed(capsys: Captured) -> None:
    command = "simulate --dp-shard 8 --model gpt2 --cluster h100x8 --global-batch 32 --micro-batch-size 2"
    assert main(command.split()) == 0
    assert "global batch 32: 16 microbatches of 2 sequences" in " ".join(capsys.readouterr().out.split())


def test_a_global_batch_without_a_cluster_is_refused(capsys: Captured) -> None:
    assert main(["simulate", "--dp-shard", "8", "--global-batch", "32"]) == 2
    assert "--global-batch needs a model and a cluster" in capsys.readouterr().err
