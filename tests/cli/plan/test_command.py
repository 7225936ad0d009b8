"""`shardlab plan`: the plan that it writes runs as it says, and what cannot be planned is one sentence."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.simulate.predict.confidence import MOST_MARGIN

MODEL = """
model = "gpt"
layers = 4
heads = 8
hidden_size = 512
vocab_size = 1024
seq_len = 512
"""
SMALL = ["--model", "small.toml", "--cluster", "h100x2", "--global-batch", "4"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardlab.planner.workers.cores", lambda: 1)
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("shardlab: ")


def test_the_plan_that_is_written_takes_as_long_as_was_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--out", "plan.toml", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    chosen = said["chosen"]
    size = ["--micro-batch-size", str(chosen["micro_batch_size"])]
    assert main(["simulate", "--plan", "plan.toml", *SMALL, *size, "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_seconds"] == pytest.approx(chosen["step_seconds"])
    assert simulated["plan"] == chosen["plan"]
    assert simulated["assumed"]
    assert said["assumed"] == simulated["assumed"]
    assert sum(chosen["shares"].values()) == pytest.approx(1)
    assert sum(said["critical_path"].values()) == pytest.approx(chosen["step_seconds"])
    assert said["searched"]["complete"]
    families = {row["family"]: row["step_seconds"] for row in said["families"]}
    assert {"data parallel", "ZeRO-1", "ZeRO-2", "ZeRO-3", "TP", "PP"} <= set(families)
    assert min(families.values()) == chosen["step_seconds"]


@pytest.mark.parametrize("columns", [60, 80])
def test_all_of_it_is_as_wide_as_the_terminal(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for commands, which are copied."""
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["plan", *SMALL, "--pp", "1", "--recompute", "none", "--explain"]) == 0
    shown = capsys.readouterr().out
    parts = "step time", "MFU", "assumed", "node 0", "best", "1. Does it fit?", "simulate it", "train it", "searched"
    for part in parts:
        assert part in shown
    assert "pp 2" not in shown
    assert [line for line in shown.splitlines() if len(line) > columns and " it  " not in line] == []


def test_the_plan_its_figures_and_the_commands_come_on_the_first_screen(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["plan", *SMALL, "--recompute", "none", "--memory", "1.3GiB"]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = ("plan ", "step time", "MFU", "memory", "how sure", "simulate it", "train it", "searched", "reasons")
    places = [next(at for at, line in enumerate(lines) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert len(lines) <= 40
    figure = r"^memory +1\.\d\d GiB  of 1\.30 GiB on the fullest device, [\d.]+ .iB free"
    assert re.search(figure, "\n".join(lines), re.MULTILINE)


def test_families_that_do_not_fit_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--pp", "1", "--recompute", "none", "--memory", "1.3GiB", "--explain"]) == 0
    assert re.search(r"no plan found that fits\n  data parallel: the smallest one takes", capsys.readouterr().out)


def test_a_budget_of_forecasts_is_kept(capsys: pytest.CaptureFixture[str]) -> None:
    reports: list[dict[str, Any]] = []
    for _ in range(2):
        assert main(["plan", *SMALL, "--forecasts", "12", "--json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert reports[0]["searched"]["simulated"] == reports[1]["searched"]["simulated"] < 24
    assert reports[0]["runners_up"] == reports[1]["runners_up"]


def test_what_is_missing_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert "give --model" in refused(capsys, "--cluster", "h100x8")
    assert "give --cluster" in refused(capsys, "--model", "gpt2")
    assert "did you mean megatron-core?" in refused(capsys, *SMALL, "--recipe", "megatron-cor")


def test_limits_that_contradict_each_other_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *SMALL, "--tp", "2", "--max-tp", "1") == ("--tp 2 is more than --max-tp 1; give one of them")
    assert "--plan gives a complete plan" in refused(capsys, *SMALL, "--plan", "small.toml")
    assert "--plan gives a complete plan" in refused(capsys, *SMALL, "--plan=small.toml")
    for words in (["--passes", "prefetch"], ["--offload", "optimizer=host"]):
        assert refused(capsys, *SMALL, *words).startswith(f"{words[0]} rewrites the program of a plan, but this")
    assert "more than h100 has" in refused(capsys, *SMALL, "--memory", "90GiB")
    assert "give bytes above 0 with their unit" in refused(capsys, *SMALL, "--memory", "much")
    output = refused(capsys, *SMALL, "--memory", "72")
    assert output == "--memory 72 has no unit; write 72GiB, 72GB, or 72B for bytes"


def test_a_batch_that_does_not_divide_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--max-tp", "1", "--max-pp", "1")
    output = refused(capsys, *SMALL[:4], "--global-batch", "3", *limits)
    assert output == (
        "no plan divides 2 devices and 3 sequences under the limits --max-tp 1 --max-pp 1: every plan has at least 2 "
        "data-parallel ranks, and ranks share a batch evenly; give a --global-batch that is a multiple of 2, or other "
        "limits"
    )
    output = refused(capsys, *SMALL[:4], "--tokens-per-step", "1000")
    assert output == (
        "1,000 tokens are not a whole number of sequences of 512 tokens; give --global-batch 1 or 2 (512 tokens)"
    )


def test_where_nothing_fits_it_is_said_what_comes_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, *SMALL, "--memory", "0.2GiB")
    assert output.startswith(
        "no plan fits into 204.8 MiB a device and leaves a margin of 15.4 MiB for the error of the "
    )
    assert "too many; weights and adamw's state, shared over all devices, and CUDA's context, alone take" in output


def test_a_search_without_time_gives_the_best_so_far_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--seconds", "1e-9"]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "the time was up: more --seconds may find a faster one" in output
    for seconds in ("0", "-1", "nan"):
        assert f"--seconds {seconds} is not a time; give a number above 0" in refused(
            capsys, *SMALL, "--seconds", seconds
        )


def test_what_is_refused_is_not_listed_and_no_option_has_two_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--help"]) == 0
    listed = capsys.readouterr().out
    names = {word for line in listed.splitlines() for word in line.split() if word.startswith("--")}
    assert {"--layers", "--tp", "--schedule", "--max-tp"} <= names
    assert not any(f"│ {flag} " in listed for flag in ("--plan", "--passes", "--offload"))
    assert listed.count("(default: its own)") == 1
    assert "one for each stage" not in listed


def test_the_critical_path_of_a_simulation_is_its_step(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "gpipe", "--path", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert sum(said["critical_path"].values()) == pytest.approx(said["end"])
    assert main(["simulate", "zero-3", *SMALL, "--path"]) == 0
    assert "critical path" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--sequence", "256", "--recipe", "fsdp2", "--optimizer", "sgd", "--memory", "40GiB"],
        ["--recipe", "nanotron", "--layers", "2"],
    ],
)
def test_the_command_that_simulates_the_plan_prices_the_same_step(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    limits = ["--pp", "1", "--recompute", "none", "--max-micro-batch-size", "1"]
    assert main(["plan", *SMALL, *limits, *words, "--json"]) == 0
    choice = json.loads(capsys.readouterr().out)
    chosen, command = choice["chosen"], shlex.split(choice["commands"]["simulate"])
    assert main([*command[1:], "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_seconds"] == pytest.approx(chosen["step_seconds"])
    assert simulated["memory_held"] == pytest.approx(chosen["memory"])
    assert simulated["plan"] == chosen["plan"]


def test_the_command_that_trains_the_plan_has_its_plan_and_batch(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--pp", "1", "--recompute", "none", "--max-micro-batch-size", "1"]
    assert main(["plan", *SMALL, *limits, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert main(["plan", *SMALL, *limits, "--out", "a plan.toml"]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("train it"))
    by_flags, by_file = said["commands"]["train"], line.removeprefix("train it").strip()
    plan = said["chosen"]["plan"]
    for command in (by_flags, by_file):
        assert main([*shlex.split(command)[1:], "--print-config"]) == 0
        rows = re.findall(r"(\w+) {2,}(\S+(?: \S+)*) {2,}\S+(?: \S+)*$", capsys.readouterr().out, re.MULTILINE)
        settings = dict(rows)
        assert int(settings["microbatches"]) * int(settings["micro_batch_size"]) == said["global_batch"]
        assert settings["precision"] == "bf16"
        assert settings["mesh"] == "dp_shard 2" == " ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
        for field in ("shard_parameters", "shard_gradients", "shard_optimizer"):
            assert settings[field] == (" ".join(plan.get(field, [])) or "none")


def test_a_plan_on_several_nodes_is_trained_by_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "small.toml", "--cluster", "h100x16", "--global-batch", "16", "--pp", "1", "--tp", "1"]
    assert main(["plan", *words, "--recompute", "none", "--json"]) == 0
    command = shlex.split(json.loads(capsys.readouterr().out)["commands"]["train"])
    assert command[:2] == ["shardlab", "submit"]
    assert main([*command[1:2], "--scheduler", "slurm", "--dry-run", *command[2:]]) == 0
    assert "--nodes=2" in capsys.readouterr().out


def test_another_frameworks_plan_has_no_command_that_trains_it(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--pp", "1", "--recompute", "none", "--max-micro-batch-size", "1"]
    assert main(["plan", *SMALL, *limits, "--recipe", "fsdp2", "--json"]) == 0
    assert [*json.loads(capsys.readouterr().out)["commands"]] == ["simulate"]


def test_where_a_margin_is_missing_it_is_said_how_much_and_that_limits_could_go(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--recipe", "nanotron", "--memory", "12.12GiB", "--recompute", "none", "--pp", "1", "--tp", "1"]
    output = refused(capsys, *SMALL, *words, "--shard-optimizer", "dp_shard")
    assert "ZeRO-1 comes nearest (shard 2, mb 1)" in output
    assert "leaves a margin of 10.0 GiB for" in output
    assert " -" not in output.split("and takes")[1].split("too many")[0]
    assert output.endswith("or fewer limits")


def test_a_plan_leaves_as_much_memory_free_as_predictions_of_memory_err(capsys: pytest.CaptureFixture[str]) -> None:
    """simulate takes the same plan on less memory."""
    words = [*SMALL, "--memory"]
    sharded = [word for state in ("parameters", "gradients", "optimizer") for word in (f"--shard-{state}", "dp_shard")]
    plan = ["--dp-shard", "2", *sharded, "--reshard-after", "layer", "--micro-batch-size", "1"]
    fixed = [*plan, "--recompute", "none"]
    assert main(["plan", *words, "80GiB", *fixed, "--json"]) == 0
    needed = json.loads(capsys.readouterr().out)["chosen"]["memory"] / (1 - MOST_MARGIN)
    assert main(["plan", *words, f"{int(1.001 * needed)}B", *fixed]) == 0
    assert "for the error of the prediction" in refused(capsys, *words, f"{int(0.999 * needed)}B", *fixed)
    assert main(["simulate", *words, f"{int(0.999 * needed)}B", *plan]) == 0


def test_where_the_state_alone_is_too_much_the_fewest_devices_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Of the sentence's own figures: beside 1 GiB of CUDA's context, all devices together hold the state."""
    output = refused(
        capsys,
        "--model",
        "llama3-8b",
        "--cluster",
        "h100x2",
        "--memory",
        "8GiB",
        "--max-pp",
        "1",
        "--recompute",
        "full",
    )
    match = re.search(r"alone take ([\d.]+) GiB; take at least (\d+) devices", output)
    assert match
    assert int(match[2]) == math.ceil(2 * (float(match[1]) - 1) / (8 * (1 - MOST_MARGIN) - 1))


def test_how_a_sequence_is_shared_is_not_asked_of_no_context_parallel_ranks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for words in (["--max-cp", "1"], ["--cp", "1"]):
        output = refused(capsys, *SMALL, "--context", "ulysses", *words)
        assert output.endswith(f"and {' '.join(words)} leaves none; give one of them")


def test_as_many_runners_up_are_listed_as_were_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *SMALL, "--pp", "1", "--recompute", "none", "--top", "3", "--out", "p.toml", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert len(said["runners_up"]) == 3
    size = said["chosen"]["micro_batch_size"]
    heading, *comments = (line for line in Path("p.toml").read_text().splitlines() if line.startswith("# "))
    assert f"4 sequences a step in microbatches of {size}, in bf16" in heading
    assert [line.removeprefix("# ") for line in comments] == list(said["commands"].values())


def test_a_value_that_no_plan_can_have_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *SMALL, "--schedule", "1f1bb") == "there is no schedule '1f1bb'; did you mean 1f1b?"
    output = refused(capsys, *SMALL, "--recompute", "0,50")
    assert output.startswith(
        "recompute is '0,50'; give one of none, selective, full, per-op, every-N, first-N, uniform-N,"
    )


def test_where_the_limits_leave_nothing_it_is_said_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *SMALL, "--recompute", "0", "50") == (
        "no plan under the limits --recompute 0 50 can be run: recompute names block 50, but the model has blocks 0-3; "
        "give numbers of these"
    )
    assert refused(capsys, *SMALL, "--stripes", "2", "--max-cp", "1").startswith(
        "no plan under the limits --stripes 2 --max-cp 1 can be run: stripes is 2 and the mesh has cp 1"
    )
    assert refused(capsys, *SMALL, "--pp", "2", "--schedule", "zb-v", "--recipe", "nanotron").endswith(
        "can be run: nanotron has no pipeline schedule zb-v; give 1f1b or gpipe"
    )


@pytest.mark.parametrize(
    "flags",
    [
        ["--tp", "2"],
        ["--memory", "70GiB"],
        ["--explain"],
        ["--top", "2"],
        ["--max-tp", "2"],
        ["--no-sequence-parallel"],
        ["--seconds", "3.5"],
        ["--out", "plan.toml", "--force"],
        ["--hidden-size", "512", "--no-bias"],
        ["--switch", "attention=flash2"],
    ],
)
def test_grades_take_no_flag_of_a_search(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, "--grade", "runs.json", *flags)
    assert (
        output == f"--grade predicts the runs in its file and does not search for a plan; leave out {' '.join(flags)}"
    )


def test_force_replaces_a_file_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, *SMALL, "--force") == (
        "--force replaces the file of --out or those of --write; give one of them, or leave it out"
    )


def test_where_the_state_alone_is_too_large_no_limit_is_blamed(capsys: pytest.CaptureFixture[str]) -> None:
    output = refused(capsys, *SMALL, "--memory", "1.15GiB", "--max-pp", "1", "--layers", "40")
    assert (
        "; weights and adamw's state, shared over all devices, and CUDA's context, alone take 1.8 GiB; take" in output
    )
    assert "leave out" not in output
    assert refused(capsys, *SMALL, "--memory", "1.2GiB", "--max-pp", "1").endswith("or fewer limits")


def test_the_job_that_is_written_takes_as_long_in_simulate_as_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """In the precision that the recipe has by default, and with the batch of the plan."""
    words = [*SMALL, "--recipe", "torchtitan", "--pp", "1", "--recompute", "none"]
    assert main(["plan", *words, "--out", "job.toml", "--json"]) == 0
    chosen = json.loads(capsys.readouterr().out)["chosen"]
    assert chosen["precision"] == "bf16-fp32-grads"
    assert main(["simulate", "--config", "job.toml", "--json"]) == 0
    simulated = json.loads(capsys.readouterr().out)
    assert simulated["step_seconds"] == pytest.approx(chosen["step_seconds"], rel=1e-6)
    assert main(["plan", "--config", "job.toml", "--pp", "1", "--recompute", "none", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["chosen"] == chosen
