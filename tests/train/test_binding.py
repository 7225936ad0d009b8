"""CPUs are dealt to the ranks of a host, whole cores and neighbours to each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardlab.program import UserError
from shardlab.train import binding
from shardlab.train.binding import CpuShare, as_ranges, asked_threads, bind, cpu_quota, dealt, threads_of, usable_cpus
from shardlab.train.launch_environment import LaunchEnvironment


def test_every_cpu_is_dealt_once_and_evenly() -> None:
    for ranks in range(1, 8):
        shares = dealt(range(7), ranks)
        assert [cpu for share in shares for cpu in share] == list(range(7))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_more_ranks_than_cpus_cannot_be_bound() -> None:
    with pytest.raises(UserError, match="3 ranks are to share 2; start fewer ranks here, or leave out --bind"):
        dealt([0, 1], 3)


def test_hyperthreads_of_a_core_are_neighbours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu in range(4):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text("0\n")
        (folder / "core_id").write_text(f"{cpu % 2}\n")
    monkeypatch.setattr(binding, "TOPOLOGY", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", Mock(return_value={0, 1, 2, 3}))
    assert usable_cpus() == [0, 2, 1, 3]


def test_a_rank_that_its_launcher_has_bound_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "usable_cpus", lambda process=0: [0, 1, 2, 3] if process else [3])
    monkeypatch.setattr(os, "sched_setaffinity", Mock(side_effect=AssertionError("it was bound again")))
    bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1, 2))


def test_a_launcher_that_does_not_say_how_many_are_here_is_asked_to() -> None:
    with pytest.raises(UserError, match="LOCAL_WORLD_SIZE"):
        bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1))


def test_cpus_are_spelled_as_ranges() -> None:
    assert as_ranges([5, 0, 1, 2, 8, 9]) == "0-2,5,8-9"


def share(host: str, cpus: str, quota: float | None = None, asked: int | None = None) -> CpuShare:
    """A share of CPUs of one digit each."""
    return CpuShare(host, frozenset(map(int, cpus)), quota, asked)


@pytest.mark.parametrize(
    ("shares", "threads"),
    [
        ([share("a", "01234567")], 8),
        ([share("a", "01234567")] * 3, 2),
        ([share("a", "01")] * 4, 1),
        ([share("a", "0123"), share("a", "4567")], 4),  # the launcher, or --bind, has dealt them
        ([share("a", "0123"), share("a", "3456")], 2),
        ([share("a", "0123"), share("b", "0123")], 4),
        ([share("a", "01234567"), share("b", "01")], 2),  # alike on all ranks
        ([share("a", "01234567", quota=2.5)] * 1, 2),
        ([share("a", "01234567", quota=0.5)] * 2, 1),
        ([share("a", "01234567", quota=6)] * 2, 3),
        ([share("a", "01", asked=5)] * 2, 5),
        ([share("a", "01234567", asked=5), share("a", "01234567")], 4),
    ],
)
def test_ranks_share_the_cpus_that_they_are_given(shares: list[CpuShare], threads: int) -> None:
    assert threads_of(shares) == threads


@pytest.mark.parametrize(
    ("variable", "threads"), [("4", 4), ("3,2", 3), (" 2 ", 2), ("", None), ("0", None), ("many", None), ("-1", None)]
)
def test_omp_num_threads_is_read_as_openmp_reads_it(variable: str, threads: int | None) -> None:
    assert asked_threads({"OMP_NUM_THREADS": variable}) == threads
    assert asked_threads({}) is None


@pytest.mark.parametrize(
    ("limits", "cpus"),
    [
        ({}, None),
        ({"a/b": "max 100000"}, None),
        ({"a/b": "250000 100000"}, 2.5),
        ({"a": "50000 100000", "a/b": "max 1"}, 0.5),
    ],
)
def test_the_quota_of_a_container_is_that_of_its_group_and_those_above(
    limits: dict[str, str], cpus: float | None, tmp_path: Path
) -> None:
    groups, root = tmp_path / "cgroup", tmp_path / "root"
    groups.write_text("12:cpuset:/other\n0::/a/b\n")
    (root / "a" / "b").mkdir(parents=True)
    for folder, limit in limits.items():
        (root / folder / "cpu.max").write_text(f"{limit}\n")
    assert cpu_quota(groups, root) == cpus
    assert cpu_quota(tmp_path / "none", root) is None


CODE = """
import os
from shardlab.train.binding import bind, usable_cpus
from shardlab.train.launch_environment import LaunchEnvironment
bind(LaunchEnvironment(1, 2, 1, "127.0.0.1", 1, 2))
print(usable_cpus())
"""


@pytest.mark.skipif(len(usable_cpus()) < 2, reason="needs two CPUs")
def test_a_process_is_bound_to_its_share() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert done.stdout == f"{dealt(usable_cpus(), 2)[1]}\n"
