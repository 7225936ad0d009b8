"""What the refusal of a step that does not fit recommends, taken literally."""

from __future__ import annotations

import re

import pytest

from shardlab.cli import main
from tests.support.thorough import sampled

REFUSED = [
    "context-parallel --model llama3-8b --cluster h100x8",
    "single --model gpt2-xl --cluster h100x1 --micro-batch-size 64",
    "single --model gpt2-xl --cluster v100x8",
    "--pp 8 --schedule gpipe --micro-batch-size 4 --model llama3-8b --cluster a100-40gbx8",
    "--pp 2 --dp-shard 2 --model llama3-8b --cluster h100x16",
    "hsdp --model llama3-70b --cluster h100x64 --micro-batch-size 4",
    "ddp --micro-batch-size 1000000 --model gpt2 --cluster h100x16",
    "ddp --micro-batch-size 48 --model gpt2-xl --cluster h100x4",
    "tensor-parallel --model gpt2-large --micro-batch-size 64 --cluster a100-40gbx2",
    "--tp 8 --dp-replicate 2 --model llama3-70b --cluster h100x64",
    "grad-accum --micro-batch-size 64 --model gpt2-large --cluster h100x1",
]


def followed(command: str, advised: str) -> str:
    """The command with the advice taken: flags are added, a strategy or a plan takes the other's place."""
    advised = advised.replace("a smaller batch, ", "").split(", which uses")[0].rstrip(",")
    words = command.split()
    if advised.startswith(("a plan, ", "grad-accum ")):
        words = words[
            words.index(
                "--model"
                if "--micro-batch-size" not in words
                else min("--model", "--micro-batch-size", key=words.index)
            ) :
        ]
    return " ".join([*words, *advised.removeprefix("a plan, ").split()])


@pytest.mark.parametrize("command", sampled(REFUSED, lambda command: "70b" not in command and "context" not in command))
def test_what_is_recommended_fits(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *command.split()]) == 2
    said = re.search(r"GiB; (.*) would fit, with ([\d.]+) [GM]iB$", capsys.readouterr().err)
    assert said is not None
    assert main(["simulate", *followed(command, said[1]).split(), "--json"]) == 0, said[1]


def test_where_nothing_fits_idle_devices_are_still_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--ep", "8", "--model", "mixtral-8x7b", "--cluster", "h100x64"]) == 2
    assert "which uses the 56 devices that are idle, takes least" in capsys.readouterr().err
