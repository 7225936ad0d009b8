"""Collectives on real ranks: right, timed at every size, and written down one by one; clocks that stand still."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.measure.collectives import COMPUTE_SECONDS, Clock, CollectiveBench, group_sizes
from shardlab.measure.doctor.checks import host_facts
from shardlab.measure.fits import KINDS, CollectivePoint, OverlapPoint, read_points
from tests.measure import jobs
from tests.support.ranks import Ranks

pytestmark = pytest.mark.starts_ranks
MeasuringRanks = Callable[[int], Ranks]


def test_every_result_is_right_and_one_that_is_not_is_counted(ranks: MeasuringRanks) -> None:
    for counts in ranks(2).call(jobs.wrong_elements, 2):
        assert set(counts) == set(KINDS)
        assert not any(right for right, _ in counts.values())
    first, second = ranks(2).call(jobs.wrong_elements, 2)
    assert {kind for kind in KINDS if first[kind][1] == 1} == set(KINDS) - {"barrier"}
    assert {kind for kind in KINDS if second[kind][1] == 1} == set(KINDS) - {"barrier", "reduce", "gather"}


def test_teams_of_neighbours_work_at_once(ranks: MeasuringRanks) -> None:
    assert ranks(4).call(jobs.teams) == [[(0, 1), (1,)]] * 2 + [[(2, 3), (5,)]] * 2


def test_groups_are_the_divisors() -> None:
    assert group_sizes(8) == (2, 4, 8)
    assert group_sizes(7) == (7,)


def test_every_kind_is_measured_at_every_size(ranks: MeasuringRanks, tmp_path: Path) -> None:
    bench = CollectiveBench(KINDS, (64, 1024), (2,), seconds=1e-4, overlap=False)
    assert ranks(2).call(jobs.collectives, bench, tmp_path / "points") == [True, False]
    points = read_points(tmp_path / "points")
    measured = [point for point in points if isinstance(point, CollectivePoint)]
    assert len(measured) == len(points)
    sizes = [(kind, size) for kind in KINDS for size in ([0] if kind == "barrier" else [64, 1024])]
    assert [(point.kind, point.bytes) for point in measured] == sizes
    assert all(point.seconds > 0 and point.iterations >= 5 and not point.wrong for point in measured)


def test_every_kind_but_messages_is_measured_beside_computations(ranks: MeasuringRanks, tmp_path: Path) -> None:
    bench = CollectiveBench(KINDS, (64,), (2,), seconds=1e-4)
    assert ranks(2).call(jobs.collectives, bench, tmp_path / "points") == [True, False]
    points = read_points(tmp_path / "points")
    measured = [point for point in points if isinstance(point, CollectivePoint)]
    assert [point.kind for point in measured] == list(KINDS)
    overlaps = [point for point in points if isinstance(point, OverlapPoint)]
    alone = {(point.kind, point.bytes): point.seconds for point in measured if point.kind != "send_recv"}
    assert [(point.kind, point.bytes) for point in overlaps] == [size for size in alone for _ in COMPUTE_SECONDS]
    assert all(min(point.compute, point.together) > 0 for point in overlaps)
    assert all(point.communication >= point.alone == alone[point.kind, point.bytes] for point in overlaps)


def test_a_point_takes_the_seconds_that_were_asked_for_in_all() -> None:
    assert CollectiveBench(KINDS, (64,), (2,), seconds=0.7).seconds_per_measurement == pytest.approx(0.1)
    assert CollectiveBench(KINDS, (64,), (2,), seconds=0.2, overlap=False).seconds_per_measurement == pytest.approx(0.2)


def test_messages_are_measured_between_two_and_the_rest_in_every_group(ranks: MeasuringRanks, tmp_path: Path) -> None:
    bench = CollectiveBench(("all_reduce", "send_recv"), (64,), (2, 4), seconds=1e-4, overlap=False)
    ranks(4).call(jobs.collectives, bench, tmp_path / "points")
    points = read_points(tmp_path / "points")
    assert all(isinstance(point, CollectivePoint) for point in points)
    assert [(point.kind, point.ranks) for point in points if isinstance(point, CollectivePoint)] == [
        ("all_reduce", 2),
        ("send_recv", 2),
        ("all_reduce", 4),
    ]


def test_a_clock_that_stands_still_measures_a_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 7.0)
    clock = Clock(torch.device("cpu"))
    clock.mark()
    clock.mark()
    assert clock.gaps() == [SHORTEST_SECONDS]
    assert clock.seconds(lambda: None, 4) == SHORTEST_SECONDS / 4


def test_a_disk_s_speed_is_a_number_on_a_clock_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", lambda: 7.0)
    assert host_facts(0, 1, write=True).write_speed
