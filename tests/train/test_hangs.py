"""Hanging and dying ranks: all end in time, and one report says who waits for whom, where and since when."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from shardlab.cli.train.before_ranks import line_lookup
from shardlab.models import find_model
from shardlab.strategies.load import load
from shardlab.train.faults import RankFailed, WatchSettings
from shardlab.train.job import Job
from shardlab.train.launch.ranks import run_ranks
from tests.support.warm import WarmStarts
from tests.train import faulty

pytestmark = pytest.mark.starts_ranks

ROOT = Path(__file__).parents[2]
TIMEOUT = 3.0
LIMIT = 60.0
"""Seconds for a start, the timeout and the end; tests share a machine."""

JOB = Job(f"{ROOT}/examples/my_strategy.py:my_ddp", 3, 3, find_model("mlp"), 1)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.delenv(name)


@cache
def failure(fault: str, culprit: int) -> RankFailed:
    """Run a training in which something goes wrong on one rank, and return how it ends."""
    began, others = time.monotonic(), set(multiprocessing.active_children())  # tests share worlds
    watching = WatchSettings(TIMEOUT, JOB.checked(), line_lookup(load(JOB.strategy), JOB))
    with pytest.raises(RankFailed) as caught:
        run_ranks(JOB.ranks, faulty.train, JOB, fault, culprit, watching=watching)
    assert time.monotonic() - began < LIMIT
    assert set(multiprocessing.active_children()) <= others
    return caught.value


VERDICTS = {
    "killed": "rank {0} was killed (SIGKILL; out of memory?), and the run ended with it.",
    "raises": "rank {0} failed, and the run ended with it.",
    "stopped": "rank {0} is stopped (SIGSTOP, or a debugger), and the run ended after the 3 s of --timeout.",
    "endless loop": "no progress on rank {0}: step 3, op 21 of 48 (",
}


@pytest.mark.parametrize(("fault", "culprit"), [("killed", 0), ("raises", 1), ("stopped", 0), ("endless loop", 1)])
def test_the_rank_at_fault_is_named_and_who_waits_for_it_in_what(fault: str, culprit: int) -> None:
    error = failure(fault, culprit)
    text, report = str(error), error.report
    assert text.startswith(VERDICTS[fault].format(culprit))
    waiting = [rank for rank in range(3) if rank != culprit]
    line = f"{ROOT}/examples/my_strategy.py:"
    for rank in waiting:
        assert f"  rank {rank}: step 3, op " in report, report
    assert report.count(f"({line}15): waits in all_reduce(layer 2) on world of microbatch") == 2, report
    assert report.count(f" for rank {culprit}, since ") == 2
    assert f"  rank {culprit}: step 3, op " in report
    assert ": is in update(layer 3)" in report
    together = f"ranks {waiting[0]}{'-' if waiting[1] - waiting[0] == 1 else ', '}{waiting[1]}"
    assert f"  {together}:\n    File " in report, report


def test_the_failed_ranks_own_traceback_is_last() -> None:
    assert str(failure("raises", 1)).rstrip().endswith("ValueError: the batch is a fish")


def test_a_rank_in_a_loop_shows_the_line_of_the_loop() -> None:
    assert f'{faulty.__file__}", line' in failure("endless loop", 1).report


@pytest.mark.skipif(not faulty.may_drop(), reason="this user may put no filter on a socket")
def test_a_broken_network_is_distinguished_from_a_hanging_rank() -> None:
    error = failure("deaf", 1)
    verdict = (
        "no data arrive between ranks 0-2, although all of them have issued their part: the network drops the data"
    )
    assert str(error).startswith(verdict), error.report
    assert "which issued their part too, since" in error.report


def launched(warm: WarmStarts, folder: Path, fault: str, *options: str) -> tuple[int, str]:
    """Exit code and words of torchrun, whose rank 1 has the fault once; nothing it started may be left."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", *options]
    words += ["-m", "tests.train.jobs", fault]
    environment = {**os.environ, "TMPDIR": str(folder)}
    process = warm.start(words, env=environment, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        said = process.communicate(timeout=2 * LIMIT)[1]  # the pipe ends with the last process that holds it
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert [path.name for path in folder.iterdir() if not path.name.startswith("torch")] == []  # its caches, logs
    return process.returncode, said


def test_under_torchrun_one_rank_reports_and_the_restart_runs_through(warm: WarmStarts, tmp_path: Path) -> None:
    code, said = launched(warm, tmp_path, "killed", "--max-restarts", "1")
    assert code == 0, said
    assert said.count("where each rank was:") == 1, said
    assert "rank 1 has gone (killed?), and the run ended with it." in said
    assert said.count("all steps taken") == 2


@pytest.mark.parametrize(
    ("fault", "verdict"),
    [
        ("stopped", "rank 1 is stopped (SIGSTOP, or a debugger), and the run ended after the 3 s of --timeout."),
        ("raises", "rank 1 failed, and the run ended with it.\n\nTraceback"),
    ],
)
def test_under_torchrun_ranks_that_hang_or_fail_end_with_one_report(
    warm: WarmStarts, tmp_path: Path, fault: str, verdict: str
) -> None:
    code, said = launched(warm, tmp_path, fault)
    assert code == 1, said
    assert said.count("where each rank was:") == 1, said
    assert f"shardlab: {verdict}" in said
    assert ": waits in all_reduce(layer 2) on world of microbatch 0 for rank 1, since " in said, said
