"""A priced step's global batch: as large for every plan on a cluster, and cut as the options say."""

from __future__ import annotations

import json

import pytest

from shardlab.cli import main
from shardlab.cli.global_batch import BatchRequest
from shardlab.program import UserError


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (BatchRequest(), (16, 1)),
        (BatchRequest(micro_batch_size=4), (16, 4)),
        (BatchRequest(microbatches=8), (8, 1)),
        (BatchRequest(microbatches=8, micro_batch_size=2), (8, 2)),
        (BatchRequest(sequences=64), (64, 1)),
        (BatchRequest(sequences=64, micro_batch_size=2), (32, 2)),
        (BatchRequest(sequences=64, microbatches=16), (16, 4)),
        (BatchRequest(sequences=64, microbatches=32, micro_batch_size=2), (32, 2)),
    ],
)
def test_a_global_batch_is_cut_into_microbatches(request_: BatchRequest, expected: tuple[int, int]) -> None:
    assert request_.cut(16, 8) == expected


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (
            BatchRequest(sequences=25, micro_batch_size=3),
            "25 sequences cannot be cut into microbatches of 3 sequences; give a mult",
        ),
        (BatchRequest(sequences=25, microbatches=8), "cannot be cut into 8 microbatches; give a multiple of 8"),
        (BatchRequest(sequences=4, microbatches=8), "cannot be cut into 8 microbatches; give a multiple of 8"),
        (BatchRequest(25, 8, 2), "cut into 8 microbatches of 2 sequences; leave out one of the three"),
        (
            BatchRequest(),
            r"16 sequences \(a microbatch .* 16 devices\) does not divide among 3 .*--global-batch 15 or 18",
        ),
        (
            BatchRequest(sequences=8, micro_batch_size=4),
            "in microbatches of 4, does not divide among 3 .*; give --global-batch 12",
        ),
    ],
)
def test_a_batch_that_does_not_divide_is_refused_in_a_sentence(request_: BatchRequest, said: str) -> None:
    with pytest.raises(UserError, match=said):
        request_.cut(16, 3)


def test_every_plan_on_a_cluster_takes_as_many_tokens_unless_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Plans of any axes, and programs of their own."""
    for layout in ("ddp", "zero-3", "--pp 4 --dp-shard 2", "--tp 4 --dp-shard 2", "--pp 8", "--dp-shard 4", "single"):
        command = ["simulate", *layout.split(), "--model", "gpt2", "--layers", "8", "--cluster", "h100x8", "--json"]
        assert main(command) == 0
        printed = json.loads(capsys.readouterr().out)
        assert (printed["global_batch"], printed["tokens"]) == (8, 8 * 1024), layout


def test_the_global_batch_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    command = "simulate --dp-shard 8 --model gpt2 --cluster h100x8 --global-batch 32 --micro-batch-size 2"
    assert main(command.split()) == 0
    assert "global batch 32: 16 microbatches of 2 sequences" in " ".join(capsys.readouterr().out.split())


def test_a_global_batch_without_a_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--dp-shard", "8", "--global-batch", "32"]) == 2
    assert "--global-batch needs a model and a cluster" in capsys.readouterr().err
