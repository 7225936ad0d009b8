"""Every check finds the environment that it is there for, and names the remedy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from shardlab.measure.doctor.checks import HOST_CHECKS, Finding, HostFacts, check_host
from shardlab.measure.doctor.network import WORLD_CHECKS, MeasuredLink, WorldFacts, check_world

VERSIONS = {"python": "3.11.7", "shardlab": "0.1.0", "torch": "2.13.0+cpu", "numpy": "2.4.6", "safetensors": "0.8.0"}

GOOD = HostFacts(
    rank=0,
    host="a",
    ranks=2,
    versions=dict(VERSIONS),
    distributed=("gloo",),
    cuda=None,
    gpus=(),
    driver=False,
    infiniband=False,
    launcher="shardlab",
    cpus=4,
    threads=None,
    open_files=4096,
    locked_memory=64 << 10,
    shared_memory=1 << 30,
    memory=8 << 30,
    folder="runs",
    disk=100 << 30,
    write_speed=500e6,
    write_error=None,
)

GPUS = {"distributed": ("gloo", "nccl"), "cuda": "12.8", "gpus": ("H100", "H100"), "driver": True}

BAD: list[tuple[str, dict[str, Any], str, str]] = [
    # check, what is changed, state, a word of the remedy
    ("python", {"versions": {**VERSIONS, "python": "3.10.2"}}, "error", "3.11"),
    ("torch", {"versions": {**VERSIONS, "torch": "2.8.1"}}, "error", "torch>=2.9"),
    ("torch", {"versions": {**VERSIONS, "torch": None}}, "error", "pip install"),
    ("packages", {"versions": {**VERSIONS, "numpy": None}}, "error", "pip install numpy"),
    ("backend", {"distributed": ()}, "error", "built with gloo"),
    ("backend", {**GPUS, "distributed": ("gloo",)}, "error", "built with nccl"),
    ("devices", {**GPUS, "ranks": 3}, "warning", "start 2 ranks on a host"),
    ("devices", {**GPUS, "ranks": 3, "launcher": "torchrun"}, "error", "start 2 ranks on a host"),
    ("devices", {"driver": True}, "warning", "torch for CUDA"),
    ("devices", {"cuda": "12.8", "driver": True}, "warning", "CUDA_VISIBLE_DEVICES"),
    ("devices", {"cuda": "12.8"}, "warning", "install NVIDIA's driver"),
    ("cpus", {"cpus": 1}, "warning", "more CPUs per task"),
    ("cpus", {"threads": "4"}, "warning", "OMP_NUM_THREADS=2"),
    ("open files", {"open_files": 200}, "error", "ulimit -n"),
    ("open files", {"open_files": 512}, "warning", "ulimit -n"),
    ("locked memory", {"infiniband": True}, "warning", "ulimit -l unlimited"),
    ("shared memory", {"shared_memory": 64 << 20}, "warning", "--shm-size"),
    ("shared memory", {"shared_memory": None}, "warning", "mount"),
    ("memory", {"memory": 1 << 30}, "warning", "fewer ranks"),
    ("disk", {"write_error": "Read-only file system", "write_speed": None}, "error", "can be written"),
    ("disk", {"disk": 100 << 20}, "warning", "free some space"),
    ("disk", {"write_speed": 1e6}, "warning", "faster disk"),
]


def find_check(check: str, facts: HostFacts) -> Finding:
    return next(finding for finding in check_host(facts) if finding.check == check)


def test_nothing_is_wrong_with_a_good_host() -> None:
    for facts in (GOOD, replace(GOOD, **GPUS), replace(GOOD, open_files=None, locked_memory=None, memory=None)):
        assert {finding.state for finding in check_host(facts)} == {"ok"}


@pytest.mark.parametrize(("check", "change", "state", "remedy"), BAD)
def test_a_bad_host_is_found_with_its_remedy(check: str, change: dict[str, Any], state: str, remedy: str) -> None:
    finding = find_check(check, replace(GOOD, **change))
    assert finding.state == state
    assert remedy in finding.remedy
    others = [other for other in check_host(replace(GOOD, **change)) if other.check != check]
    assert all(other.state == "ok" for other in others), others


def test_every_check_that_can_fail_is_tried() -> None:
    assert set(HOST_CHECKS) - {check for check, *_ in BAD} == {"launcher"}
    assert set(WORLD_CHECKS) == {check for check, *_ in BAD_WORLD}


RANKS = [replace(GOOD, rank=rank, host="ab"[rank // 2]) for rank in range(4)]
LINKS = [MeasuredLink(rank, (rank + 1) % 4, 1e-4, 2e9, 0) for rank in range(4)]
WORLD = WorldFacts(RANKS, LINKS, [0.0, 0.001, -0.002, 0.0])

BAD_WORLD = [
    (
        "versions",
        {"hosts": [*RANKS[:3], replace(RANKS[3], versions={**VERSIONS, "torch": "2.12.0"})]},
        "error",
        "torch 2.13.0+cpu on rank 0, 2.12.0 on rank 3 (b)",
    ),
    ("clocks", {"clocks": [0.0, 0.0, -3.5, -3.4]}, "warning", "rank 2 (b) is 3.5 s behind"),
    ("messages", {"links": [*LINKS[:3], replace(LINKS[3], wrong=2)]}, "error", "2 numbers arrived wrong"),
    ("links", {"links": [LINKS[0], replace(LINKS[1], bandwidth=1e8), *LINKS[2:]]}, "warning", "ranks 1-2, a to b"),
]


@pytest.mark.parametrize(("check", "change", "state", "present"), BAD_WORLD)
def test_a_bad_world_is_found(check: str, change: dict[str, Any], state: str, present: str) -> None:
    finding = next(candidate for candidate in check_world(replace(WORLD, **change)) if candidate.check == check)
    assert finding.state == state
    assert present in finding.present
    assert finding.remedy


def test_each_host_is_checked_once_by_its_first_rank() -> None:
    findings = list(check_world(WORLD))
    assert [finding.host for finding in findings if finding.check == "disk"] == ["a", "b"]
    assert {finding.state for finding in findings} == {"ok"}
