"""`plan --measure` prints commands that run, and `--measured` takes in what they leave."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.cli.plan.measure import OUT_OF_MEMORY
from shardlab.measure.profile import this_machine
from tests.cli.test_plan_options_cluster import profile_of

pytestmark = pytest.mark.starts_ranks

MODEL = """
model = "gpt"
layers = 2
heads = 2
hidden_size = 32
vocab_size = 256
seq_len = 16
"""
HERE = ["--model", "small.toml", "--cluster", "local.json", "--global-batch", "4", "--recompute", "none"]
H100 = ["--model", "small.toml", "--cluster", "h100x2", "--global-batch", "4", "--recompute", "none"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "small.toml").write_text(MODEL)
    profile_of(this_machine()).write(tmp_path / "local.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shardlab.planner.workers.cores", lambda: 1)
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["plan", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["plan", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("shardlab: ")


def test_a_command_runs_and_its_folder_is_taken_in(capsys: pytest.CaptureFixture[str]) -> None:
    if this_machine().places != 2:
        pytest.skip("needs two cores: a machine is profiled on a rank for each, and these plans are for two ranks")
    first = planned(capsys, *HERE, "--measure", "2")["experiments"][0]
    assert first["command"].endswith("--steps 13 --out runs/measure-1")
    assert main(shlex.split(first["command"])[1:]) == 0
    capsys.readouterr()
    after = planned(capsys, *HERE, "--measured", "runs/measure-1")
    ran = [row for row in after["measured"]["plans"] if row["measured_seconds"] is not None]
    assert [row["plan"] for row in ran] == [first["plan"]]
    assert ran[0]["predicted_seconds"] == first["predicted_seconds"]
    steps = [json.loads(line)["dt"] for line in Path("runs/measure-1/metrics.jsonl").read_text().splitlines()]
    assert min(steps) <= ran[0]["measured_seconds"] <= max(steps)
    assert after["chosen"]["step_seconds"] < first["predicted_seconds"]  # which the profile says takes seconds
    assert "and h100x2 is 1 x 2 h100; leave it out" in refused(capsys, *H100, "--measured", "runs")
    other = ["--layers", "4", *HERE]
    output = refused(capsys, *other, "--measured", "runs")
    assert output == "runs/measure-1 trained another model than small.toml: its layers is 2, not 4; leave it out"
    other = [*HERE[:-3], "8", *HERE[-2:]]
    assert "sequences a step 4 there, and 8 here" in refused(capsys, *other, "--measured", "runs/measure-1")


def test_what_measure_prints_is_taken_in_with_the_seconds_filled_in(capsys: pytest.CaptureFixture[str]) -> None:
    Path("small.toml").write_text(MODEL.replace("32", "512").replace("16", "512"))
    todo = planned(capsys, *H100, "--measure", "3")
    first, *others = todo["experiments"]
    assert others, "more than one plan is near"
    others[0]["measured_seconds"] = 0.96 * others[0]["predicted_seconds"]
    Path("results.json").write_text(json.dumps(todo))
    next_output = planned(capsys, *H100, "--measured", "results.json", "--measure", "1")
    assert next_output["chosen"]["plan"] == first["plan"], "all may be as much faster as the one that was measured"
    assert [experiment["plan"] for experiment in next_output["experiments"]] == [first["plan"]]
    assert main(["plan", *H100, "--measured", "results.json", "--measure", "1"]) == 0
    shown = capsys.readouterr().out
    assert "after 1 measured step" in shown
    assert "after measuring" in shown
    assert "--measured results.json runs/measure-1" in shown.splitlines()[-1]
    first["measured_seconds"] = 1.02 * first["predicted_seconds"]
    Path("results.json").write_text(json.dumps(todo))
    assert planned(capsys, *H100, "--measured", "results.json")["chosen"]["plan"] == others[0]["plan"]


def test_milliseconds_in_the_place_of_seconds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    todo = planned(capsys, *H100, "--measure", "1")
    (first,) = todo["experiments"]
    first["measured_seconds"] = 1000 * first["predicted_seconds"]
    Path("results.json").write_text(json.dumps(todo))
    output = refused(capsys, *H100, "--measured", "results.json")
    assert output.startswith(f"results.json, experiment 1: {first['family']}, ")
    assert output.endswith("more than 10 times off; is it in seconds? give those of one step, or leave it out")


def test_a_run_that_ended_out_of_memory_is_a_result(capsys: pytest.CaptureFixture[str]) -> None:
    todo = planned(capsys, *H100, "--measure", "1")
    (first,) = todo["experiments"]
    first["measured_seconds"] = "out of memory"
    Path("results.json").write_text(json.dumps(todo))
    assert planned(capsys, *H100, "--measured", "results.json")["chosen"]["plan"] != first["plan"]
    assert main(["plan", *H100, "--measured", "results.json"]) == 0
    assert "it ran out of memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    "why",
    [
        "rank 0 failed RuntimeError: [enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory: "
        "you tried to allocate 99 bytes. Error code 12 (Cannot allocate memory)",
        "rank 1 was killed (SIGKILL; out of memory?)",
        "rank 0 failed torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB",
    ],
)
def test_why_a_run_ended_tells_that_it_ran_out_of_memory(why: str) -> None:
    assert OUT_OF_MEMORY.search(why)
    assert not OUT_OF_MEMORY.search("rank 0 failed ConnectionResetError: Connection reset by peer")


def test_a_cluster_of_several_nodes_gets_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*H100[:3], "h100x16", "--global-batch", "16", "--max-pp", "1", "--measure", "1"]
    (one,) = planned(capsys, *words)["experiments"]
    assert one["command"].startswith("shardlab submit --nodes 2 --ranks-per-node 8 --gpus-per-node 8 --name measure-1")
    command = shlex.split(one["command"])
    assert main([*command[1:2], "--dry-run", "--scheduler", "slurm", *command[2:]]) == 0
    assert "#SBATCH --nodes=2" in capsys.readouterr().out


def test_another_frameworks_plans_are_described_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *H100, "--recipe", "megatron-core", "--measure", "1"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "shardlab train" not in shown
    assert "run them in megatron-core" in shown


def test_what_is_no_result_is_refused_in_one_sentence(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    def output(text: str) -> str:
        (folder / "results.json").write_text(text)
        return refused(capsys, *H100, "--measured", "results.json")

    assert "no such file or folder" in refused(capsys, *H100, "--measured", "none.json")
    (folder / "empty").mkdir()
    assert "this folder contains no run" in refused(capsys, *H100, "--measured", "empty")
    assert "results.json" in output("not JSON")
    assert "holds no results: take what shardlab plan --measure 3 --json prints" in output("[1, 2]")
    head = {"model": "small.toml", "cluster": "h100x2", "global_batch": 4, "tokens": 64}
    row = {"plan": {"mesh": {"dp_shard": 2}}, "micro_batch_size": 1, "precision": "bf16", "measured_seconds": 1.0}
    assert "model gpt2 there, and small.toml here" in output(
        json.dumps({**head, "model": "gpt2", "experiments": [row]})
    )
    assert "cluster h100x4 there" in output(json.dumps({**head, "cluster": "h100x4", "experiments": [row]}))
    assert "no experiment in results.json has measured_seconds" in output(json.dumps({**head, "experiments": []}))
    wrong = {
        "measured_seconds is 'fast'": {"measured_seconds": "fast"},
        "measured_seconds is 0": {"measured_seconds": 0},
        "has no plan": {"plan": 3},
        "experiment 1: ": {"precision": "bf17"},
        "on 4 ranks, and the plan is for 2": {"plan": {"mesh": {"dp_shard": 4}}},
    }
    for problem, change in wrong.items():
        assert problem in output(json.dumps({**head, "experiments": [{**row, **change}]}))
