"""A measured machine, in a file and as a cluster."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shardlab.language import UserError
from shardlab.language.pass_names import NO_LAG, Lag
from shardlab.models.layout import FusedAttention, Matmul, Pointwise
from shardlab.simulate.hardware import AlphaBeta, Cluster, Machine, Profile, Rate, find_cluster
from shardlab.simulate.hardware.profile import FastestProduct

MACHINE = Machine("a CPU", places=2, torch="2.9", backend="gloo")
PROFILE = Profile(
    machine=MACHINE,
    collectives={("all_reduce", 2): AlphaBeta(1e-4, 1e-9), ("all_reduce", 4): AlphaBeta(3e-4, 3e-9)},
    messages=AlphaBeta(5e-5, 2e-10),
    kernels={
        ("matmul", "float32"): Rate(1e-5, 1e11, 1e10),
        ("pointwise", "float32"): Rate(1e-5, 0, 1e10),
        ("pointwise:gelu", "float32"): Rate(1e-5, 0, 2e9),
        ("attention", "float32"): Rate(1e-5, 5e10, 1e10),
    },
    memory=8e9,
    layers=[{"name": "block", "seconds": 0.1}],
    alone={("op:backward", "float32"): Rate(9e-5, 0, 0)},
    contention=0.75,
    lag=Lag(0.5, 2e-3, 0.4),
    peaks={
        ("float32", 1): FastestProduct(1.8e11, 4),
        ("float32", 4): FastestProduct(5e10, 1),
        ("bfloat16", 1): FastestProduct(3e11, 4),
    },
)


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Profile.read(PROFILE.write(tmp_path / "new" / "profile.json"), this_machine=MACHINE) == PROFILE


def test_where_no_product_is_held_up_by_arithmetic_no_peak_is_known() -> None:
    kernels = {("matmul", "float32"): Rate(1e-5, 0, 1e10)}
    device = Cluster.of_profile(replace(PROFILE, kernels=kernels, peaks={})).device
    assert device.peak("float32") == math.inf
    assert device.seconds(Matmul(8, 8, 8), "float32") > 1e-5


@pytest.mark.parametrize(
    ("dtype", "ranks", "threads", "peak"),
    [
        ("float32", 1, 4, 1.8e11),
        ("float32", 4, 1, 2e11),
        ("float32", 2, 2, 2e11),  # all cores are at work, as when four computed at once
        ("float32", 8, 1, 2e11),  # two share a core
        ("float32", 1, 1, 5e10),  # OMP_NUM_THREADS is set
        ("float32", 1, 64, 2e11),
        ("bfloat16", 2, 2, 3e11),
        ("float16", 1, 4, None),
    ],
)
def test_the_peak_of_a_run_is_that_of_the_cores_at_work(
    dtype: str, ranks: int, threads: int, peak: float | None
) -> None:
    assert PROFILE.peak_flops(dtype, ranks, threads) == peak


def test_a_device_is_as_fast_as_its_fastest_product_and_as_any_kernel_of_the_fit() -> None:
    """Fits of small layers are off by far; what a step should take at most is never more than the peak."""
    slow = {("matmul", "float32"): Rate(1e-5, 1e10, 1e10)}
    assert Cluster.of_profile(replace(PROFILE, kernels=slow)).device.peak("float32") == 5e10
    assert Cluster.of_profile(PROFILE).device.peak("float32") == 1e11
    alone = Cluster.of_profile(replace(PROFILE, alone=slow)).at_work(1)
    assert alone.device.peak("float32") == 1.8e11


def test_one_rank_alone_has_the_memory_to_itself() -> None:
    cluster = Cluster.of_profile(PROFILE)
    assert cluster.at_work(2) is cluster
    assert cluster.at_work(1).device.overhead("backward", "float32") == 9e-5
    assert find_cluster("h100x8").at_work(1).device.name == "h100"


def test_communication_slows_compute_as_was_measured() -> None:
    assert (Cluster.of_profile(PROFILE).contention, find_cluster("h100x8").contention) == (0.75, 0)
    assert (Cluster.of_profile(PROFILE).lag, find_cluster("h100x8").lag) == (PROFILE.lag, NO_LAG)


def test_sums_that_go_around_a_ring_have_a_line_of_their_own() -> None:
    large = {**PROFILE.collectives, ("large_all_reduce", 2): AlphaBeta(0.0, 2e-9)}
    cluster = Cluster.of_profile(replace(PROFILE, collectives=large))
    seconds = [cluster.collective_seconds("all_reduce", bytes, [0, 1]) for bytes in (2**20, 2**22)]
    assert seconds == pytest.approx([1e-4 + 1e-9 * 2**20, 2e-9 * 2**22])
    one_line_seconds = Cluster.of_profile(PROFILE).collective_seconds("all_reduce", 2**22, [0, 1])
    assert one_line_seconds == pytest.approx(1e-4 + 1e-9 * 2**22)


def test_it_lies_in_the_cache_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert PROFILE.write() == tmp_path / "shardlab" / "profile.json"
    cluster = find_cluster("local", this_machine=MACHINE)
    assert (cluster.size, cluster.nodes, cluster.device.name) == (2, 1, "a CPU")


def test_a_profile_from_another_machine_is_refused_unless_forced(tmp_path: Path) -> None:
    path = PROFILE.write(tmp_path / "profile.json")
    this_machine = Machine("a CPU", places=8, torch="2.9", backend="gloo")
    with pytest.raises(
        UserError, match=r"from another machine: places 2 there, 8 here; --other-machine takes it anyway"
    ):
        Profile.read(path, this_machine=this_machine)
    assert Profile.read(path, this_machine=this_machine, other_machine=True) == PROFILE


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 7}', '{"version": 7, "machine": {"x": 1}}', '"text"'])
def test_a_file_that_is_no_profile_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(UserError, match="is not a profile") as refused:
        Profile.read(path)
    assert "indices" not in str(refused.value)


@pytest.mark.parametrize(
    ("entry", "value", "reason"),
    [
        ("memory", 0, "memory is 0; give a number above 0"),
        ("machine", {**asdict(MACHINE), "places": 0}, "machine.places is 0; give 1 or more"),
    ],
)
def test_a_machine_with_no_place_or_no_memory_is_refused(
    tmp_path: Path, entry: str, value: object, reason: str
) -> None:
    path = PROFILE.write(tmp_path / "profile.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), entry: value}))
    with pytest.raises(UserError, match=rf"is not a profile \({reason}\)"):
        Profile.read(path)


@pytest.mark.parametrize("figure", [-1.0, float("nan"), float("inf"), "fast", None])
def test_a_profile_with_figures_that_cannot_be_is_refused(tmp_path: Path, figure: object) -> None:
    path = PROFILE.write(tmp_path / "profile.json")
    data = json.loads(path.read_text())
    data["messages"]["alpha"] = figure
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match="is not a profile"):
        Profile.read(path)


def test_a_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    path = PROFILE.write(tmp_path / "profile.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "version": 1}))
    with pytest.raises(UserError, match="version 1, not 7; run shardlab bench again"):
        Profile.read(path)


def test_a_missing_profile_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="shardlab bench measures this machine"):
        Profile.read(tmp_path / "profile.json")


def eight_places() -> Cluster:
    return Cluster.of_profile(replace(PROFILE, machine=replace(MACHINE, places=8)))


def test_collectives_take_what_was_measured() -> None:
    cluster = eight_places()
    assert cluster.collective_seconds("all_reduce", 1e6, [0, 1]) == pytest.approx(1.1e-3)
    assert cluster.collective_seconds("all_reduce", 1e6, range(4)) == pytest.approx(3.3e-3)
    assert cluster.message_seconds(1e6, 0, 1) == pytest.approx(2.5e-4)


def test_a_group_size_between_two_measured_ones_lies_between_them() -> None:
    cluster = eight_places()
    assert cluster.collective_seconds("all_reduce", 1e6, range(3)) == pytest.approx(2.2e-3)
    assert cluster.collective_seconds("all_reduce", 1e6, range(8)) == pytest.approx(3.3e-3)


def test_a_collective_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match="the profile has no all_gather; measure it: shardlab bench collectives"):
        Cluster.of_profile(PROFILE).collective_seconds("all_gather", 1.0, [0, 1])


def test_kernels_take_what_was_measured() -> None:
    device = Cluster.of_profile(PROFILE).device
    assert device.seconds(Matmul(1000, 1000, 1000), "float32") == pytest.approx(1e-5 + 2e9 / 1e11 + 1.2e7 / 1e10)
    assert device.seconds(Pointwise("gelu", 1e6, 1e6), "float32") == pytest.approx(1e-5 + 4e6 / 2e9)
    assert device.seconds(Pointwise("norm", 1e6, 1e6), "float32") == pytest.approx(1e-5 + 4e6 / 1e10)
    backward = FusedAttention(1, 2, 2, 64, 64, 8, 0.5, backward=True)
    assert device.seconds(backward, "float32") == pytest.approx(
        1e-5 + backward.flops / 5e10 + 4 * backward.elements / 1e10
    )


def test_a_kernel_that_was_not_measured_is_refused() -> None:
    with pytest.raises(UserError, match="the profile has no matmul in float64; measure it: shardlab bench compute"):
        Cluster.of_profile(PROFILE).device.seconds(Matmul(8, 8, 8), "float64")
