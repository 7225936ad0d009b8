"""Requests of a step on a cluster: what options leave out, and the global batch, which is as large for every plan."""

from __future__ import annotations

import json

import pytest

from shardlab.cli import main
from shardlab.cli.step_request import StepRequest, default_precision
from shardlab.language import UserError
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.recipe import find_recipe
from shardlab.train.config import BatchConfig

Captured = pytest.CaptureFixture[str]

NARROW = ("--max-pp", "1", "--max-cp", "1")
"""Limits of a short search."""


@pytest.mark.parametrize(
    ("recipe", "device", "precision"),
    [
        ("shardlab", "h100", "bf16"),
        ("shardlab", "v100", "fp32"),
        ("torchtitan", "h100", "bf16-fp32-grads"),  # FSDP2 reduces gradients in float32
        ("torchtitan", "v100", "fp32"),
        ("megatron-core", "a100", "bf16"),
        ("megatron-2021", "a100", "bf16-fp32-grads"),  # --bf16 sums gradients in float32
        ("nanotron", "h100", "bf16-fp32-grads"),
    ],
)
def test_the_recipe_and_the_device_determine_the_default_precision(recipe: str, device: str, precision: str) -> None:
    assert default_precision(find_recipe(recipe), find_cluster(f"{device}x1").device) == precision
    request = StepRequest("gpt2", f"{device}x1", recipe=recipe)
    assert [each.name for each in request.precisions] == [precision]


@pytest.mark.parametrize("recipe", ["shardlab", "torchtitan", "megatron-core"])
def test_the_command_of_a_plan_reproduces_its_time_and_memory(recipe: str, capsys: Captured) -> None:
    assert main(["plan", "--model", "gpt2", "--cluster", "h100x8", "--recipe", recipe, *NARROW, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    assert main([*choice["commands"]["simulate"].split()[1:], "--json"]) == 0
    simulated, chosen = json.loads(capsys.readouterr().out), choice["chosen"]
    assert simulated["step_seconds"] == pytest.approx(chosen["step_seconds"], rel=1e-9)
    assert simulated["memory_held"] == pytest.approx(chosen["memory"], rel=1e-9)


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


def test_every_plan_on_a_cluster_takes_as_many_tokens_unless_told(capsys: Captured) -> None:
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
