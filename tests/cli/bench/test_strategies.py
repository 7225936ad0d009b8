"""`shardlab bench strategies`: what it prints and writes, and what it refuses before any rank is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shardlab.cli import main
from shardlab.cli.bench.strategies import BenchStrategies
from shardlab.measure.side_by_side import results
from shardlab.measure.side_by_side.results import Comparison, PairRow, Side, Size, StrategyPair
from tests.measure.side_by_side.jobs import TINY

pytestmark = pytest.mark.starts_ranks
Captured = pytest.CaptureFixture[str]
COMPARE = "shardlab.measure.side_by_side.sides.compare_rank"
SIDES = Side([1.0, 2.0], [0.5, 0.5], 90), Side([2.0, 4.0], [0.5, 0.5], 100), Side([1.0, 2.0], [0.25, 0.25], 50)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--only", "zero3"], "there is no pair with a strategy 'zero3'; did you mean zero-3?"),
        (["--sizes", "smal"], "there is no size 'smal'; did you mean small?"),
        (["--ranks", "1"], "one rank has no other rank to communicate with; give --ranks 2 or 4"),
        (["--passes", "buckets"], "did you mean bucket"),
        (["--transport", "nccl"], "--transport is 'nccl'; there are gloo, shared"),
        (["--each-pass", "--transport", "gloo"], "--each-pass times only our programs"),
        (["--turns", "0"], "--turns: 0 is too few; give 1 or more"),
        (["--out", "a-file"], "--out a-file: this is a file; name a folder"),
    ],
)
def test_bad_requests_are_one_sentence(
    options: list[str], sentence: str, capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a-file").touch()
    assert main(["bench", "strategies", *options]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert sentence in output.err
    assert output.err.count("\n") == 1


def test_a_pair_is_compared_in_a_table_and_files(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(results.SIZES, "overhead", TINY)
    options = ["--only", "ddp", "hsdp", "--sizes", "overhead", "--turns", "2", "--out", str(tmp_path / "out")]
    assert main(["bench", "strategies", *options]) == 0
    output = capsys.readouterr().out
    assert "tiny: 16 wide, 64 tokens a step, 2 ranks" in output
    assert "ddp after" in " ".join(output.split()), "as train runs it, what helps rewrites it"
    assert "two replicas of two shards need 4 ranks" in " ".join(output.split()), "what is not run is said"
    written = json.loads((tmp_path / "out" / "strategies.json").read_text())
    assert {"date", "machine", "python", "torch", "command", "load_before", "rows"} <= set(written)
    ddp, hsdp = written["rows"]
    assert ddp["loss_error"] < 1e-6
    assert ddp["transport"] == "shared"
    assert "both sides communicate by shared" in output
    assert ddp["pytorch"] == "torch.nn.parallel.DistributedDataParallel"
    assert len(ddp["ours"]["turns"]) == len(ddp["theirs"]["turns"]) == 2
    assert set(ddp["ours"]["parts"]) == {"compute", "overhead", "waiting"}
    assert "give --ranks 4" in hsdp["why_not"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        f"strategies.{end}" for end in ("json", "png", "svg")
    }


def test_both_sides_can_be_compared_on_gloo(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(results.SIZES, "overhead", TINY)
    options = ["--only", "ddp", "--sizes", "overhead", "--turns", "2", "--transport", "gloo", "--json"]
    assert main(["bench", "strategies", *options]) == 0
    written = json.loads(capsys.readouterr().out)
    assert written["command"].endswith("--transport gloo")
    assert written["rows"][0]["transport"] == "gloo"


def test_each_pass_has_its_predicted_gain_beside_the_measured_one(
    tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has nothing to do is said as well."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(results.SIZES, "overhead", TINY)
    options = ["--each-pass", "--only", "zero-1", "1f1b", "--sizes", "overhead", "--turns", "2"]
    assert main(["bench", "strategies", *options, "--passes", "prefetch,bucket=1", "--out", str(tmp_path)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "zero-1 bucket=1" in output
    assert "zero-1 nothing to do, or to gain: prefetch (no weights are gathered for a pass" in output
    assert "1f1b none" in output
    assert "of unmeasured cores" in output
    written = json.loads((tmp_path / "passes.json").read_text())
    assert written["command"].endswith("--passes prefetch,bucket=1 --each-pass")
    sums, alone = written["rows"]
    ((bucket,), nothing) = sums["passes"], alone["passes"]
    assert bucket["pass"] == "bucket=1"
    assert 0 < abs(bucket["predicted_gain"]) < 1
    assert bucket["measured_gain"]["low"] <= bucket["measured_gain"]["median"] < 1
    assert [len(turns) for turns in sums["turns"]] == [2, 2]
    assert (sums["loss_error"] < 1e-6, nothing) == (True, [])
    assert set(alone["nothing"]) == {"prefetch", "bucket"}


def fails(*_: object) -> Comparison:
    raise NotImplementedError("torch cannot do this here")


def differs(*_: object) -> Comparison:
    return Comparison(*SIDES, [1.0, 1.0], [1.0, 1.01])


def test_what_torch_cannot_run_is_said_with_its_reason(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMPARE, fails)
    assert main(["bench", "strategies", "--only", "ddp", "--sizes", "overhead"]) == 1
    assert "not compared: NotImplementedError: torch cannot do this here" in " ".join(capsys.readouterr().out.split())


def test_pairs_compared_before_an_interruption_are_reported(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    row = BenchStrategies._row

    def interrupted_at_ddp(bench: BenchStrategies, pair: StrategyPair, size: Size) -> PairRow:
        if pair.name == "ddp":
            raise KeyboardInterrupt
        return row(bench, pair, size)

    # Not `run_ranks`: a module that is first imported meanwhile would keep the one that is interrupted for ever.
    monkeypatch.setattr(BenchStrategies, "_row", interrupted_at_ddp)
    assert main(["bench", "strategies", "--only", "hsdp", "ddp", "--sizes", "overhead", "--json"]) == 130
    output = capsys.readouterr()
    assert [row["strategy"] for row in json.loads(output.out)["rows"]] == ["hsdp"]
    assert output.err.splitlines()[-1] == "shardlab: interrupted after 1 pair"


def test_no_time_counts_where_losses_differ(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(COMPARE, differs)
    assert main(["bench", "strategies", "--only", "ddp", "--sizes", "overhead", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)["rows"]
    assert row["why_not"] == "losses differ by 9.9e-03 (relative), so times do not count"
    assert "ratio" not in row
