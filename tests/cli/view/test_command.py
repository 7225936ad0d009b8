"""`shardlab view`: a page of a step, of a run and of a trace, and one sentence for anything else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from shardlab.cli import main
from shardlab.draw.viewer.columns import decode
from shardlab.learn.course.catalogue import find
from shardlab.learn.course.folder import CourseFolder
from shardlab.learn.course.grading import grade
from shardlab.simulate.timeline.measured import MEASURED
from tests.cli.test_compare import write_profile, written
from tests.draw.viewer.test_page import data_of


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which the command runs. There is no profile of this machine."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def header_of(path: str | Path = "view.html") -> dict[str, Any]:
    return decode(data_of(Path(path).read_text(encoding="utf-8")))[0]


def shown(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The JSON of a command that succeeds."""
    assert main(["view", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The sentence of a command that is refused, without a page."""
    assert main(["view", *words]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert not Path("view.html").exists()
    return error.strip()


def test_a_strategy_has_a_page_and_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "gpipe"]) == 0
    printed = capsys.readouterr().out
    for word in (
        "compute",
        "exposed communication",
        "overlap",
        "idle",
        "bubble",
        "with communication",
        "(p - 1) / (m + p - 1)",
        "straggler",
    ):
        assert word in printed
    assert printed.splitlines()[-1].split() == ["page", "view.html"]
    assert header_of()["title"] == "gpipe"


def test_the_times_are_those_of_simulate(capsys: pytest.CaptureFixture[str]) -> None:
    for options in (["gpipe"], ["fsdp", "--costs", "puzzle"], ["--pp", "4", "--schedule", "zb-v"]):
        page = shown(options, capsys)
        assert main(["simulate", *options, "--json"]) == 0
        simulated = json.loads(capsys.readouterr().out)
        (timeline,) = page["timelines"]
        assert timeline["end"] == simulated["end"]
        if timeline["bubble_with_communication"] is not None:
            assert timeline["bubble"] == simulated["bubble"]
            assert timeline["bubble_with_communication"] == simulated["bubble_with_communication"]


def test_with_json_a_page_is_written_only_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    shown(["ddp"], capsys)
    assert not Path("view.html").exists()
    assert shown(["ddp", "--out", "page.html"], capsys)["page"] == "page.html"
    assert header_of("page.html")["title"] == "ddp"


def test_a_page_is_replaced_but_not_a_users_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "ddp"]) == 0
    assert main(["view", "fsdp"]) == 0
    capsys.readouterr()
    Path("mine.html").write_text("<p>mine")
    assert main(["view", "fsdp", "--out", "mine.html"]) == 2
    assert "mine.html: this file exists" in capsys.readouterr().err
    assert Path("mine.html").read_text() == "<p>mine"


def test_a_step_on_a_cluster_is_in_seconds_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--pp", "2", "--dp-shard", "4", "--model", "gpt2", "--cluster", "a100x8", "--microbatches", "8"]
    assert main(["view", *words]) == 0
    assert "ms" in capsys.readouterr().out
    header = header_of()
    assert (header["unit"], header["memory"], len(header["rows"])) == ("s", "bytes", 2)
    assert header["timelines"][0]["path"]


def test_a_job_is_shown_as_by_config(capsys: pytest.CaptureFixture[str]) -> None:
    Path("job.toml").write_text('[plan]\nmesh = {pp = 2}\nschedule = "1f1b"\n[batch]\nmicrobatches = 6\n')
    by_name = shown(["job.toml"], capsys)
    assert by_name["timelines"] == shown(["--config", "job.toml"], capsys)["timelines"]
    assert by_name["timelines"][0]["bubble_closed_form"] == pytest.approx(1 / 7)
    assert "both job.toml and --config" in refused(["job.toml", "--config", "job.toml"], capsys)


def test_the_file_of_an_exercise_is_shown_as_it_is_graded(capsys: pytest.CaptureFixture[str]) -> None:
    CourseFolder.create(Path("course"))
    for name in ("one_rank", "buckets", "fsdp", "hsdp_once", "ring_attention"):
        entry, file = find(name), Path("course", f"{name}.py")
        file.write_text(entry.solution_text)
        page = shown([str(file)], capsys)
        goals = grade(entry.exercise, entry.solution).figures
        assert goals is not None
        assert page["title"] == (str(file) if entry.exercise.kind == "plan" else f"{file}:{name}")
        assert page["timelines"][0]["end"] == goals.time
        assert main(["simulate", str(file), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["end"] == goals.time
    assert refused(["course/choose_plan.py"], capsys).endswith("add --model llama3-70b --cluster h100x64")
    assert "does not fit on 4 ranks" in refused(["course/buckets.py", "--ranks", "4"], capsys)
    assert main(["view", "course/fsdp.py", "--ranks", "2", "--layers", "3"]) == 0
    assert "2 ranks, 3 layers, 4 microbatches" in capsys.readouterr().out
    Path("fsdp.py").write_text(find("fsdp").solution_text)
    assert main(["view", "fsdp.py"]) == 0
    assert "4 ranks, 4 layers" in capsys.readouterr().out, "not in a course folder"


def test_a_step_without_communication_has_no_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(["single"], capsys)["timelines"][0]["overlap"] is None
    assert main(["view", "single"]) == 0
    assert re.search(r"overlap of communication +no communication", capsys.readouterr().out)


def test_a_straggler_has_the_name_of_its_rank_and_equal_ranks_have_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["view", "gpipe", "--layers", "6"]) == 0
    assert re.search(r"straggler: rank 1, beyond the mean +\d+\.\d%", capsys.readouterr().out)
    assert main(["view", "gpipe"]) == 0
    assert re.search(r"straggler +none", capsys.readouterr().out)


def test_a_trace_that_simulate_wrote_has_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "fsdp", "--trace", "trace.json"]) == 0
    capsys.readouterr()
    (of_trace,) = shown(["trace.json", "--out", "view.html"], capsys)["timelines"]
    (of_step,) = shown(["fsdp"], capsys)["timelines"]
    assert of_trace["compute"] == pytest.approx(of_step["compute"], abs=1e-6)
    assert not header_of().get("specs")


def test_a_run_is_shown_below_its_prediction(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run").mkdir()
    written(folder / "run")
    write_profile()
    assert main(["view", "run"]) == 0
    heading = capsys.readouterr().out.splitlines()[2].split()
    assert heading == ["predicted", "measured", "difference"]
    predicted, measured = header_of()["timelines"]
    assert (predicted["name"], measured["name"]) == ("predicted", "measured")
    assert measured["end"] > 2 * predicted["end"]
    assert header_of()["remarks"] == []


def test_a_run_without_a_prediction_and_with_a_lost_rank_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    written(folder / "run", whole=False)
    assert [timeline["name"] for timeline in shown(["run", "--out", "view.html"], capsys)["timelines"]] == ["measured"]
    remarks = header_of()["remarks"]
    assert "incomplete: rank 0 left no record" in remarks
    assert any(remark.startswith("there is no prediction") for remark in remarks)
    assert main(["view", "run"]) == 0
    assert "incomplete: rank 0 left no record" in capsys.readouterr().out


def test_a_trace_of_a_run_that_is_cut_off_is_shown_as_far_as_it_goes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "run").mkdir()
    written(folder / "run")
    path = folder / "run" / MEASURED
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:4]))
    remarks = shown(["run", "--out", "view.html"], capsys)["remarks"]
    assert any("is cut off" in remark for remark in remarks)
    assert header_of()["remarks"] == remarks


def test_other_files_are_refused_in_a_sentence(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("notes.txt").write_text("hello")
    assert "notes.txt is no strategy" in refused(["notes.txt"], capsys)
    Path("schedule.csv").write_text("0F0,0B0")
    assert "--schedule schedule.csv" in refused(["schedule.csv"], capsys)
    Path("cut.json").write_text('{"traceEvents": [')
    assert "cut.json is cut off or damaged" in refused(["cut.json"], capsys)
    Path("other.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert "other.json is a trace of another program" in refused(["other.json"], capsys)
    (folder / "empty").mkdir()
    assert "empty has no trace" in refused(["empty"], capsys)
    assert "there is no strategy 'fsdq'" in refused(["fsdq"], capsys)


def test_options_of_a_step_are_refused_with_a_run_or_a_trace(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run").mkdir()
    written(folder / "run")
    assert "run is a run, which has its own step; leave out --ranks" in refused(["run", "--ranks", "2"], capsys)
    assert "leave out --pp" in refused(["run", "--pp", "2"], capsys)
    assert "leave out --hidden-size" in refused(["run", "--hidden-size", "32"], capsys)
    assert main(["simulate", "ddp", "--trace", "trace.json"]) == 0
    capsys.readouterr()
    assert "trace.json is a trace, which has its own step" in refused(["trace.json", "--cluster", "h100x2"], capsys)


def test_force_needs_a_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--force replaces a page, but none is written with --json" in refused(["ddp", "--json", "--force"], capsys)
    assert "leave out --out, --json and --force" in refused(["ddp", "--edit", "--force"], capsys)


def test_a_wrong_program_is_refused_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("wrong.py").write_text("async def wrong(rank):\n    rank.weights[0]\n")
    assert main(["view", "wrong.py:wrong", "--ranks", "1"]) == 1
    assert "wrong.py:2" in capsys.readouterr().err


def test_too_many_ops_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shardlab.cli.view.command.MOST_OPS", 10)
    assert "are too many for a page of at most 10" in refused(["ddp"], capsys)
