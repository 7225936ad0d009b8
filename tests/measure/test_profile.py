"""Measurements are kept in the machine's profile, beside earlier ones."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardlab.language import UserError
from shardlab.measure.fits import CollectivePoint, OverlapPoint, PeakPoint
from shardlab.measure.profile import save, this_machine, updated_profile
from shardlab.simulate.hardware import Cluster, Profile
from tests.measure.test_fits import LAYER

SIZES = (1024, 1 << 20)


def line(kind: str, alpha: float, beta: float, ranks: int = 2) -> list[CollectivePoint]:
    return [CollectivePoint(kind, ranks, size, alpha + beta * size, 20, 0) for size in SIZES]


def test_a_saved_fit_is_read_back_and_prices_collectives(tmp_path: Path) -> None:
    points = [*line("all_reduce", 1e-4, 1e-9), *line("send_recv", 5e-5, 2e-9)]
    cluster = Cluster.of_profile(Profile.read(save(points, tmp_path / "profile.json"), this_machine=this_machine()))
    assert cluster.collective_seconds("all_reduce", 1e6, [0, 1]) == pytest.approx(1.1e-3)
    assert cluster.message_seconds(1e6, 0, 1) == pytest.approx(2.05e-3)


def test_one_bench_leaves_what_the_other_measured(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save(line("all_reduce", 1e-4, 1e-9), path)
    save([LAYER], path)
    save(line("all_gather", 2e-4, 1e-9), path)
    profile = Profile.read(path)
    assert set(profile.collectives) == {("all_reduce", 2), ("all_gather", 2)}
    assert ("matmul", "float32") in profile.kernels
    assert profile.layers[0]["layer"] == "mlp"


def test_kernels_are_those_of_a_busy_machine_and_apart_those_of_one_process() -> None:
    alone = replace(LAYER, processes=1, seconds=1e-3)
    profile = updated_profile([alone, LAYER])
    assert sum(rate.launch for rate in profile.alone.values()) < sum(rate.launch for rate in profile.kernels.values())


def test_the_measured_peaks_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    save([LAYER, PeakPoint("float32", 1, 2048, 2e11, 2), PeakPoint("float32", 2, 1024, 9e10, 1)], path)
    save([LAYER, PeakPoint("float32", 1, 2048, 3e11, 2)], path)
    profile = Profile.read(path)
    assert [profile.peak_flops("float32", *run) for run in ((1, 2), (2, 1))] == [3e11, 1.8e11]


def in_rounds(alone: float, compute: float, contention: float, lag: float, hidden: float = 0.0) -> OverlapPoint:
    """Return measurements with a given loss."""
    together = max(alone, compute) + contention * min(alone, compute) + hidden
    return OverlapPoint("all_reduce", 2, round(1e6 * alone), alone, compute, alone + lag, together)


def test_the_usual_loss_beside_compute_is_kept() -> None:
    """The overlaps are 0 %, 25 % and 100 %. Short measurements do not count."""
    points = [in_rounds(1.0, 2.0, share, 0.5) for share in (1.0, 0.75, 0.0)]
    assert updated_profile([*points, *[in_rounds(0.01, 2.0, 50.0, 0.5)] * 6]).contention == pytest.approx(0.75)


def test_the_lag_grows_with_what_is_computed_and_no_further_than_it_was_seen_to() -> None:
    lags = {seconds: min(0.5 * seconds, 2e-3) for seconds in (5e-4, 6e-4, 9e-3, 8e-3)}
    large = [in_rounds(1.0, 2.0, 0.8, 2e-3, hidden=1e-3)] * 2
    points = [in_rounds(1e-4, seconds, 0.8, lag, hidden=0.5 * lag) for seconds, lag in lags.items()]
    lag = updated_profile([*points, *large]).lag
    assert [lag.seconds(computed) for computed in (0.0, 1e-3, 1.0)] == pytest.approx([0.0, 5e-4, 2e-3])
    assert lag.hidden == pytest.approx(0.5, rel=0.01)


def test_a_profile_without_messages_says_so(tmp_path: Path) -> None:
    cluster = Cluster.of_profile(Profile.read(save([LAYER], tmp_path / "profile.json")))
    with pytest.raises(UserError, match="the profile has no messages; measure them: shardlab bench collectives"):
        cluster.message_seconds(8, 0, 1)


def test_a_named_file_of_another_machine_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    other = replace(this_machine(), places=999)
    replace(updated_profile([LAYER]), machine=other).write(path)
    with pytest.raises(UserError, match="from another machine: places 999 there"):
        save([LAYER], path)
    assert Profile.read(path).machine == other


def test_in_the_cache_it_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    replace(updated_profile([LAYER]), machine=replace(this_machine(), torch="1.0")).write()
    assert Profile.read(save([LAYER])).machine == this_machine()
