"""`shardlab bench`: what it prints, what it keeps, and what it refuses before any rank is started."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from shardlab.cli import main
from shardlab.cli.bench.report import add_collectives, add_compute, hidden_text
from shardlab.cli.console import Report
from shardlab.measure.fits import KINDS, CollectivePoint, LayerPoint, OverlapPoint, PeakPoint, Point, append
from shardlab.simulate.hardware import Profile
from tests.support.processes import PATIENCE
from tests.support.warm import WarmStarts

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[3]
TINY = ["--min", "64", "--max", "256", "--seconds", "0.0001"]


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["collectives", "--min", "1 lot"], "'1 lot' is not a size"),
        (["collectives", "--min", "2KB", "--max", "1KB"], "the largest size, 1 KB, is less than the smallest, 2 KB"),
        (["collectives", "--kinds", "allreduce"], "there is no collective 'allreduce'; did you mean all_reduce"),
        (["collectives", "--ranks", "1"], "one rank has no other rank to communicate with; give --ranks 2 or more"),
        (["collectives", "--seconds", "0"], "--seconds is 0.0; give a positive number of seconds"),
        (["collectives", "--plot", "no/such/folder.svg"], "the folder no/such does not exist"),
        (["collectives", "--profile", "mine.txt"], "--profile mine.txt: its name must end in .json"),
        (["compute", "--plot", "plot.gif"], "--plot plot.gif: its name must end in .svg, .png or .pdf"),
        (["compute", "--batches", "8by128"], "'8by128' is not a microbatch"),
        (["compute", "--dtype", "float31"], "no dtype that can be measured 'float31'; did you mean float32"),
        (["compute", "--widths", "4"], "a width of 4 is too small"),
    ],
)
def test_bad_requests_are_one_sentence(options: list[str], sentence: str, capsys: Captured) -> None:
    assert main(["bench", *options]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert output.err.count("\n") == 1


def test_collectives_are_reported_in_json_drawn_and_kept(tmp_path: Path, capsys: Captured) -> None:
    profile, plot = tmp_path / "profile.json", tmp_path / "bench.svg"
    kinds = ["--kinds", "all_reduce", "barrier", "send_recv"]
    files = ["--profile", str(profile), "--plot", str(plot)]
    assert main(["bench", "collectives", "--ranks", "2", *TINY, *kinds, *files, "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert set(output) == {
        *("machine", "collectives", "overlap", "fits", "peaks", "layers", "kernels", "profile", "failure"),
    }
    points = [(row["kind"], row["bytes"]) for row in output["collectives"]]
    assert points == [*(("all_reduce", 64), ("all_reduce", 256), ("barrier", 0), ("send_recv", 64), ("send_recv", 256))]
    assert not any(row["wrong"] for row in output["collectives"])
    bandwidths = {"algorithm_bandwidth", "bus_bandwidth", "cs336_bandwidth"}
    assert {"seconds", "iterations", "ranks", *bandwidths} < set(output["collectives"][0])
    assert {"compute", "communication", "together", "overlap"} < set(output["overlap"][0])
    assert {"kind", "ranks", "alpha", "beta", "errors", "doubt"} == set(output["fits"][0])
    assert output["failure"] is None
    saved_profile = Profile.read(profile)
    assert {(fit["kind"], fit["ranks"]) for fit in output["fits"]} == {*saved_profile.collectives, ("send_recv", 2)}
    assert saved_profile.messages is not None
    assert "all_reduce" in plot.read_text()


def test_layers_are_reported_in_tables_and_nothing_is_stored_unasked(tmp_path: Path, capsys: Captured) -> None:
    plot = tmp_path / "bench.png"
    sizes = ["--widths", "16", "--batches", "1x8", "2x8", "--vocab-size", "32", "--seconds", "0.0001"]
    assert main(["bench", "compute", "--ranks", "1", *sizes, "--no-save", "--plot", str(plot), "--verbose"]) == 0
    output = capsys.readouterr().out
    for words in (
        "share of the peak",
        "each, 1 at once, in float32",
        "last block",
        "fit, 1 at once",
        "matmul_backward",
    ):
        assert words in output
    assert "\nbatch " not in output.split("launch us")[0], "drawing one has no forward pass"
    assert plot.stat().st_size > 0
    assert "profile " not in output


POINTS: list[Point] = [
    CollectivePoint("all_reduce", 2, 1024, 1e-3, 20, 3),
    OverlapPoint("all_reduce", 2, 1024, 1e-3, 1e-3, 1e-3, 1.5e-3),
    PeakPoint("float32", 1, 1024, 5e10),
]


def measures_some(rank: int, device: object, bench: object, file: Path) -> bool:
    for point in POINTS:
        append(file, point)
    raise ValueError("the cable is a fish")


def test_what_was_measured_before_a_failure_is_reported_and_kept(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardlab.measure.collectives.measure_collectives", measures_some)
    options = ["--ranks", "2", "--profile", str(tmp_path / "profile.json")]
    assert main(["bench", "collectives", *options]) == 1
    output = capsys.readouterr()
    assert "all_reduce" in output.out
    assert "50%" in output.out
    assert "doubtful        all_reduce: a single size does not separate" in output.out
    assert "wrong           3 elements of all_reduce among 2 ranks at 1 KB" in output.out
    assert "the cable is a fish" in output.err
    assert ("all_reduce", 2) in Profile.read(tmp_path / "profile.json").collectives


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path, warm: WarmStarts) -> None:
    command = ["-m", "shardlab", "bench", "collectives", "--ranks", "2", "--kinds", "all_reduce"]
    options = ["--min", "4", "--max", "1KB", "--factor", "2", "--seconds", "1", "--json"]
    files = ["--profile", str(tmp_path / "profile.json")]
    pipe = subprocess.PIPE
    with warm.start([*command, *options, *files], stdout=pipe, stderr=pipe, text=True) as bench:
        assert bench.stderr is not None
        first = bench.stderr.readline()
        assert first.startswith("    1/9  all_reduce")
        time.sleep(0.1)
        bench.send_signal(signal.SIGINT)
        out, err = bench.communicate(timeout=PATIENCE)
    assert bench.returncode == 130, err
    output = json.loads(out)
    assert output["failure"] == "interrupted"
    assert 1 <= len(output["collectives"]) < 9
    assert ("all_reduce", 2) in Profile.read(tmp_path / "profile.json").collectives
    assert err.splitlines()[-1].startswith("shardlab: interrupted")


@pytest.mark.parametrize(("share", "text"), [(-6.75, "none"), (0.0, "0%"), (0.5, "50%"), (1.4, "100%")])
def test_what_was_hidden_is_a_share_of_what_could_be(share: float, text: str) -> None:
    assert hidden_text(share) == text


def collectives(ranks: int = 2) -> list[Point]:
    """All kinds at six sizes."""
    points: list[Point] = []
    for kind in KINDS:
        for size in [0] if kind == "barrier" else [1024 * 4**power for power in range(6)]:
            points.append(CollectivePoint(kind, ranks, size, 1e-2 + 1e-9 * size, 20, 0))
            points.append(OverlapPoint(kind, ranks, size, 1e-3, 1e-3, 1e-2 + 1e-9 * size, 1.05e-2))
    return points


def printed(show: Callable[..., None], points: list[Point], verbose: bool = False, width: int = 80) -> list[str]:
    text, report = io.StringIO(), Report()
    show(report, points, verbose)
    report.print(Console(file=text, width=width, highlight=False))
    return text.getvalue().splitlines()


def test_collectives_are_reported_on_one_screen_and_at_every_size_on_demand() -> None:
    lines = printed(add_collectives, collectives())
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    (row,) = [line.split() for line in lines if line.startswith("all_reduce")]
    assert row == ["all_reduce", "10,001", "11,049", "0.095", "10,000", "1.000", "0%", "54%"]
    every = printed(add_collectives, collectives(), verbose=True)
    assert sum(line.startswith("all_reduce") for line in every) == 6 + 6 + 1
    assert not [line for line in [*lines, *every] if "CS336" in line]


def test_layers_are_reported_at_their_largest_size() -> None:
    points: list[Point] = [
        LayerPoint(layer, op, width, 4, 64, 100, "float32", processes, 1e-3, 1e-3, (("matmul", 1e6, 1e4),))
        for layer in ("attention", "mlp", "norm", "head", "embedding")
        for op in ("forward", "backward", "update")
        for width in (64, 512)
        for processes in (1, 2)
    ]
    points += [PeakPoint("float32", processes, 512, 1e10) for processes in (1, 2)]
    lines = printed(add_compute, points)
    assert len(lines) <= 24
    assert [line.split()[:2] for line in lines if line.startswith("mlp")] == [["mlp", "512"]]
    assert not [line for line in lines if "doubtful" in line]
    slow = [replace(point, flops=1e8) if isinstance(point, PeakPoint) else point for point in points]
    assert any("faster than the peak" in line for line in printed(add_compute, slow))
