"""`shardlab compare`, on runs that never were: the numbers in them are made up."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.check import Checked
from shardlab.cli import main
from shardlab.language import Mesh
from shardlab.language.tape import RankRecord
from shardlab.measure.profile import this_machine
from shardlab.models import GPT
from shardlab.simulate.hardware import AlphaBeta, Machine, Profile, Rate
from shardlab.simulate.timeline import PUZZLE_COSTS
from shardlab.simulate.timeline.measured import write_rank, write_trace
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job, job_as_dict, job_from_dict
from tests.draw.trace_format import names_of, require_readable
from tests.simulate.timeline.test_measured import records

JOB = Job("fsdp", 2, 2, GPT(layers=3, hidden_size=16, heads=2, seq_len=8), 2)

FREE = dict.fromkeys(("matmul", "attention", "pointwise"), 0.0)
LAUNCHES = {**FREE, "op:forward": 1.0, "op:backward": 1.0, "update": 0.5}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where profiles are looked for; there is none yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def write_profile(machine: Machine | None = None, path: Path | None = None) -> None:
    """A machine on which ops take, in seconds, what they take in the puzzles' costs."""
    collectives = {(kind, 2): AlphaBeta(0.3, 0.0) for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    kernels = {(family, "float32"): Rate(launch, 0.0, 0.0) for family, launch in LAUNCHES.items()}
    Profile(machine or this_machine(), collectives, AlphaBeta(0.2, 0.0), kernels, 1e9).write(path)


def written(folder: Path, *, whole: bool = True) -> Checked:
    """A run whose steps took three times what the puzzles' costs say."""
    checked = JOB.checked()
    rank_records: dict[int, RankRecord] = records(checked, 3.0, 3.0, costs=PUZZLE_COSTS)
    if whole:
        write_trace(folder, job_as_dict(JOB), checked, rank_records)
    else:
        write_rank(folder, job_as_dict(JOB), checked.program.fingerprint(), rank_records[1])
    return checked


def test_the_runs_beside_a_run_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for number, name in enumerate("abcde"):
        folder = Path("runs", name)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text("{}")
        os.utime(folder / "run.json", (number, number))
    assert main(["compare", "runs/e"]) == 2
    assert capsys.readouterr().err == (
        "shardlab: runs/e has no trace (shardlab train --trace) to compare with a prediction; beside it lie runs/d, "
        "runs/c, runs/b and 1 more: shardlab compare runs/e runs/d\n"
    )
    written(Path("runs/e"))
    assert main(["compare", "runs/e"]) == 0
    assert "beside it lie runs/d, runs/c, runs/b and 1 more:" in capsys.readouterr().out
    monkeypatch.chdir("runs/e")
    assert main(["compare", "."]) == 0
    assert "shardlab compare . ../d" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    Path("alone").mkdir()
    written(Path("alone"))
    assert main(["compare", "alone"]) == 0
    assert "beside" not in capsys.readouterr().out


def test_a_run_of_a_users_file_is_shown_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    (project / "runs" / "a").mkdir(parents=True)
    (project / "mine.py").write_text("from shardlab.strategies.ddp import ddp as step\n")
    monkeypatch.chdir(project)
    assert main(["schedule", "gpipe", "--pp", "2", "--microbatches", "2", "--csv", "mine.csv"]) == 0
    for strategy in ("mine.py:step", Plan(Mesh(pp=2), "mine.csv")):
        job = replace(JOB, strategy=strategy)
        monkeypatch.chdir(project)
        write_trace(project / "runs" / "a", job_as_dict(job), job.checked(), records(job.checked(), 3.0, 3.0))
        (project / "runs" / "a" / "run.json").write_text(json.dumps({"folder": str(project)}))
        monkeypatch.chdir(tmp_path)
        for command in ("compare", "view"):
            assert main([command, "project/runs/a"]) == 0
            assert "forward" in (text := capsys.readouterr().out) or "page" in text


def test_the_table_has_prediction_measurement_and_ratio(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    write_profile()
    assert main(["compare", str(tmp_path), "--svg", str(tmp_path / "c.svg")]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["fsdp", "on", "2", "ranks"] in lines
    assert ["0", "forward", "3", "3,000.00", "ms", "9,000.00", "ms", "0.33"] in lines
    assert (tmp_path / "c.svg").read_text().count("measured") >= 2


def test_both_timelines_go_into_one_file_for_trace_viewers(tmp_path: Path) -> None:
    written(tmp_path)
    write_profile()
    assert main(["compare", str(tmp_path), "--trace", str(tmp_path / "both.json")]) == 0
    events = json.loads((tmp_path / "both.json").read_text())["traceEvents"]
    require_readable(events)
    names = names_of(events, "process_name")
    assert list(names.values()) == ["predicted rank 0", "predicted rank 1", "measured rank 0", "measured rank 1"]
    (measured,) = [process for (process, _), name in names.items() if name == "measured rank 0"]
    live = [event["args"] for event in events if event["ph"] == "C" and event["pid"] == measured]
    assert live == [{"parameters": 8, "activations": 6}]


def test_a_picture_and_a_trace_are_not_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    for command in (["compare", str(tmp_path)], ["simulate", "ddp"]):
        assert main([*command, "--svg", str(tmp_path / "a"), "--trace", str(tmp_path / "a")]) == 2
        assert "give them different files" in capsys.readouterr().err


def test_json_alone_has_every_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    write_profile()
    assert main(["compare", str(tmp_path), "--cluster", "local", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step"]["ratio"] == pytest.approx(1 / 3)
    assert len(said["steps"]) == 2
    assert said["ranks"][0]["memory_by_category"] == {"parameters": 8, "activations": 6}
    assert said["ranks"][1]["memory"]["measured"] == 14
    updates = [row for row in said["ops"] if row["op"] == "update"]
    assert [(row["rank"], row["ops"], row["predicted"]) for row in updates] == [(0, 3, 1.5), (1, 3, 1.5)]
    assert (said["missing"], said["job"]["strategy"]) == ([], "fsdp")


def test_the_profile_of_another_machine_is_taken_only_if_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    write_profile(Machine("another CPU", 64, "2.0", "gloo"))
    assert main(["compare", str(tmp_path)]) == 2
    assert "is from another machine" in capsys.readouterr().err
    assert main(["compare", str(tmp_path), "--other-machine"]) == 0


def test_a_profile_in_a_file_is_predicted_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    write_profile(path=tmp_path / "mine.json")
    assert main(["compare", str(tmp_path), "--cluster", str(tmp_path / "mine.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"]["ratio"] == pytest.approx(1 / 3)


def test_a_named_cluster_is_another_machine_to_predict_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    assert main(["compare", str(tmp_path), "--cluster", "h100x2", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["step"]["predicted"] < 0.1


def test_a_plan_that_the_recipe_s_framework_does_not_run_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = replace(JOB, strategy=Plan(Mesh(dp_shard=2), shard_optimizer=("dp_shard",), shard_gradients=("dp_shard",)))
    write_trace(tmp_path, job_as_dict(job), checked := job.checked(), records(checked, 3.0, 3.0, costs=PUZZLE_COSTS))
    assert main(["compare", str(tmp_path), "--cluster", "h100x2", "--recipe", "nanotron"]) == 0
    sentence = "nanotron has ZeRO 0 and 1, and this plan is ZeRO-2; let data-parallel ranks share"
    assert f"note: {sentence}" in capsys.readouterr().out
    assert main(["compare", str(tmp_path), "--cluster", "h100x2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["notes"] == []


def test_without_a_profile_the_measurement_stands_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written(tmp_path)
    assert main(["compare", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["step"]["predicted"], said["ranks"][0]["memory"]["predicted"]) == (None, None)
    assert said["step"]["measured"] > 0
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "\n  shardlab bench collectives --ranks 2\n  shardlab bench compute --ranks 2\n" in out
    assert "predicted  " not in out
    assert ["0", "forward", "3", "9,000.00", "ms"] in [line.split() for line in out.splitlines()]


def test_of_a_crashed_run_what_there_is_is_shown_and_what_is_missing_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, whole=False)
    assert main(["compare", str(tmp_path), "--trace", str(tmp_path / "trace.json")]) == 0
    out = capsys.readouterr().out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    require_readable(events)
    assert {event["pid"] for event in events if event["ph"] == "X"} == {1}
    assert "incomplete: rank 0 left no record" in out
    assert "1     forward" in out


def test_of_a_file_that_was_cut_off_what_can_be_read_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path)
    path = tmp_path / "measured.jsonl"
    text = path.read_text()
    path.write_text(text[: 2 * len(text) // 3])
    assert main(["compare", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert f"incomplete: {path} is cut off: " in out
    assert "1     forward" in out


def run_of(folder: Path, first: float, **record: object) -> Path:
    """A run of six steps, of which the even ones are on record, and the third is validated."""
    folder.mkdir()
    known = {"began": "2026-01-02", "name": "plan", "ranks": 2, "strategy": {"mesh": {"dp_shard": 2}}, **record}
    (folder / "run.json").write_text(json.dumps(known))
    times = {"dt": 0.5, "tps": 200.0, "learning_rate": 0.1, "mfu": None, "memory": 2**20, "memory_max": 2**21}
    records = [{"step": step, "loss": first - step, "grad_norm": None, **times} for step in range(0, 6, 2)]
    records[1]["validation_loss"] = first + 1
    (folder / "metrics.jsonl").write_text("".join(json.dumps(metrics) + "\n" for metrics in records))
    return folder


def test_runs_stand_beside_each_other_and_are_drawn_into_one_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [run_of(Path("a"), 9.0), run_of(Path("b"), 8.0, name="ddp", strategy="ddp")]
    assert main(["compare", "a", "b", "--svg", "both.svg"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "a", "dp_shard", "2", "5", "5.000", "10.000", "200", "500.0", "2"] in lines
    assert ["2", "b", "ddp", "5", "4.000", "9.000", "200", "500.0", "2"] in lines
    assert [line for line in lines if len(line) == 3 and line[0].isdigit()] == [
        ["1", "9.0000", "8.0000"], ["3", "7.0000", "6.0000"], ["5", "5.0000", "4.0000"],
    ]  # fmt: skip
    assert main(["compare", "a", "b", "--svg", "both.svg"]) == 0, "it is Shardlab's own"
    assert all(f"<!-- {run} -->" in Path("both.svg").read_text() for run in runs), "the legend names both"


def test_the_json_of_several_runs_has_the_steps_that_all_have(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [run_of(tmp_path / name, 9.0) for name in "abc"]
    with (runs[2] / "metrics.jsonl").open("w") as file:
        file.write('{"step": 2, "loss": 1.0, "dt": 1, "tps": 1}\n{"step": 3, "lo')
    assert main(["compare", *map(str, runs), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [run["folder"] for run in said["runs"]] == list(map(str, runs))
    assert [run["validation_loss"] for run in said["runs"]] == [10.0, 10.0, None]
    (row,) = said["steps"]
    assert (row["step"], row["loss"], row["validation_loss"]) == (2, [7.0, 7.0, 1.0], [10.0, 10.0, None])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no run is given; give the folder of a run, or of several"),
        (["a", "./a"], "a run is given twice"),
        (["a", "nowhere"], "nowhere does not exist; name the folder of a run"),
        (["a", "empty"], "empty has no recorded steps yet"),
        (["a", "empty", "--cluster", "local"], "--cluster is for the prediction of one run, but 2 runs are given"),
        (["a", "empty", "--other-machine"], "--other-machine is for the prediction of one run, but 2 runs are given"),
    ],
)
def test_runs_that_cannot_be_compared_are_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Path("a"), 1.0)
    (run_of(Path("empty"), 1.0) / "metrics.jsonl").write_text("")
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere does not exist; give the folder of a run"),
        (["."], "has no trace; run shardlab train with --trace"),
    ],
)
def test_a_folder_without_a_trace_is_refused(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_run_too_short_to_be_traced_is_refused_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--trace", "--steps", "4", "--strategy", "ddp", "--ranks", "2"]) == 2
    assert "--trace needs 15 steps, but --steps is 4" in capsys.readouterr().err


PLAN = Plan(
    Mesh(pp=2, dp_shard=2), "zb-h1", shard_optimizer=("dp_shard",), reduce_every_microbatch=(), recompute=(0, 2)
)


@pytest.mark.parametrize("strategy", ["fsdp", PLAN, Plan(Mesh(tp=2), sequence_parallel=True)])
def test_a_job_is_the_same_after_it_was_written_down(strategy: str | Plan) -> None:
    job = Job(strategy, 4, 8, GPT(layers=4, hidden_size=16, heads=2, kv_heads=1), 2, seed=3, name="mine")
    assert job_from_dict(json.loads(json.dumps(job_as_dict(job)))) == job


def test_a_model_of_another_version_is_refused() -> None:
    words = {**job_as_dict(JOB), "model": {"kind": "Perceptron"}}
    with pytest.raises(Exception, match="this version of Shardlab cannot read the job"):
        job_from_dict(words)
