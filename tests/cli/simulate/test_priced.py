"""What a priced simulation prints: in the terminal's width, in units that show something, with what to beware of."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardlab.cli import main
from shardlab.cli.console import Report
from shardlab.cli.plan_options import PlanOptions, plan_flags
from shardlab.cli.simulate.priced import PricedStep, add_step, doubts, price
from shardlab.cli.step_request import StepRequest
from shardlab.language import Mesh
from shardlab.simulate.hardware import Cluster, Machine, Profile, Rate
from shardlab.simulate.predict import forecast

Captured = pytest.CaptureFixture[str]

THREE_D = plan_flags(pp=2, dp_shard=2, tp=2)


def of(strategy: str | None, model: str, cluster: str, layout: PlanOptions = plan_flags()) -> PricedStep:  # noqa: B008
    return price(StepRequest(model, cluster, strategy, layout))


def printed(result: PricedStep, width: int = 80) -> list[str]:
    text = io.StringIO()
    report = Report()
    add_step(report, result)
    report.print(Console(file=text, width=width, highlight=False))
    return text.getvalue().splitlines()


@pytest.mark.parametrize(
    ("strategy", "model", "cluster", "layout"),
    [
        ("fsdp", "gpt2", "h100x8", plan_flags()),
        (None, "gpt2-large", "h100x16", THREE_D),
        ("1f1b", "gpt2", "h100x16", plan_flags()),
        ("ddp", "gpt", "h100x2", plan_flags()),
    ],
)
def test_no_line_is_wider_than_the_terminal(
    strategy: str | None, model: str, cluster: str, layout: PlanOptions
) -> None:
    result = of(strategy, model, cluster, layout)
    for width in (60, 80, 160):
        assert max(map(len, printed(result, width))) <= width


def test_small_figures_are_shown_in_small_units() -> None:
    text = "\n".join(printed(of("ddp", "gpt", "h100x2")))
    assert "GiB  of 80 GiB: context and communicators 1.00" in text
    assert " 0.00" not in text
    (mfu,) = [line.split()[1] for line in text.splitlines() if line.startswith("MFU")]
    assert 0 < float(mfu.removesuffix("%")) < 0.1


def test_memory_that_is_not_counted_is_named() -> None:
    """Ranks on CPUs share memory for messages, as those on GPUs do not, and one alone."""
    result = of("ddp", "gpt", "h100x2")
    assert "without what ranks share" not in " ".join(printed(result))
    cpu = Profile(Machine("a CPU", 4, "2.8", "gloo"), {}, None, {("matmul", "bfloat16"): Rate(0.0, 1e9, 1e9)}, 2.0**32)
    there = replace(result, workload=replace(result.workload, cluster=Cluster.of_profile(cpu)))
    assert "without what ranks share for messages" in " ".join(" ".join(printed(there)).split())
    alone = replace(there, workload=replace(there.workload, plan=Mesh()))
    assert "without" not in " ".join(printed(alone))


def test_an_mfu_above_1_is_warned_of() -> None:
    result = of("ddp", "gpt2", "h100x2")
    assert result.notes == [note for note in result.notes if "MFU" not in note]
    slow = replace(result.workload.cluster.device, flops={"bfloat16": 1e9})
    too_fast = replace(result.workload, cluster=replace(result.workload.cluster, device=slow))
    (warning,) = doubts(too_fast, result.estimate.traced, result.step, "local")
    assert "is more than the device can reach" in warning


def test_a_step_with_more_ops_than_are_traced_is_predicted(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    """Its time and memory are those of the whole replay, and what needs every op is left out or refused."""
    words = ["simulate", "--pp", "2", "--dp-shard", "2", "--model", "gpt2", "--cluster", "h100x4"]
    words += ["--global-batch", "128", "--recipe", "megatron-core"]
    assert main([*words, "--json"]) == 0
    whole = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(forecast, "MAX_FOLDED_OPS", 5000)
    assert main([*words, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    for figure in ("step_seconds", "peak_memory", "memory_held", "mfu"):
        assert output[figure] == pytest.approx(whole[figure], rel=1e-3)
    assert "bubble" in whole.keys() - output.keys()
    assert "has more than" in output["notes"][-1]
    assert main([*words, "--path"]) == 2
    assert "--path needs all ops of the step" in capsys.readouterr().err


def test_idle_devices_are_reported() -> None:
    assert any("7 of the 8 devices of v100x8 are idle" in line for line in printed(of("grad-accum", "gpt2", "v100x8")))
    assert not any("idle" in note for note in of("ddp", "gpt2", "v100x8").notes)


def test_a_folded_run_says_which_ranks_stand_for_which() -> None:
    result = of(None, "gpt2", "h100x8", THREE_D)
    assert "rank 0 stands for ranks 0-3, rank 4 stands for ranks 4-7" in " ".join(" ".join(printed(result)).split())
    deep = of(None, "gpt2", "h100x32", plan_flags(pp=8, dp_shard=4))
    assert "rank 8 stands for ranks 8-11, ..., rank 28 stands for ranks 28-31" in " ".join(
        " ".join(printed(deep)).split()
    )


def test_the_trace_of_a_folded_run_names_the_ranks_of_each_process(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    arguments = "simulate --pp 2 --dp-shard 4 --model gpt2 --layers 2 --cluster h100x8 --trace"
    assert main([*arguments.split(), str(path)]) == 0
    events = json.loads(path.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == ["ranks 0-3 (pp 0, all as rank 0)", "ranks 4-7 (pp 1, all as rank 4)"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("ddp --model gpt2 --cluster h100x16384", "16,384 ranks one by one, 589,824 ops or more; a plan folds"),
        ("ddp --model gpt2-xl --cluster h100x100000000", "that are alike: --dp-shard 100000"),
        ("tensor-parallel --model llama3-405b --cluster h100x16384", "tensor-parallel slices"),
        ("zero-3 --model gpt2 --cluster h100x100000000", "at most 100,000 along an axis are simulated"),
    ],
)
def test_what_would_take_minutes_is_refused_at_once(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *command.split()]) == 2
    assert said in capsys.readouterr().err
