"""Points are kept as they are measured, and read again."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardlab.measure.points import CollectivePoint, LayerPoint, OverlapPoint, PeakPoint, Point, append, read_points

LAYER = LayerPoint(
    "mlp", "forward", 64, 2, 32, 1024, "float32", 2, 2e-3, 1e-3, (("matmul", 2e6, 3e4), ("pointwise:gelu", 0.0, 1e4))
)
POINTS: list[Point] = [
    CollectivePoint("all_reduce", 4, 1 << 20, 1e-3, 20, 0),
    OverlapPoint("all_reduce", 4, 1 << 20, alone=2e-3, compute=1e-3, communication=2e-3, together=2.25e-3),
    LAYER,
    PeakPoint("float32", 2, 1024, 5e10),
]


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    for point in POINTS:
        append(tmp_path / "points", point)
    assert read_points(tmp_path / "points") == POINTS


def test_a_point_whose_writing_was_interrupted_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "points"
    assert read_points(file) == []
    for point in POINTS:
        append(file, point)
    file.write_bytes(file.read_bytes()[:-9])
    assert read_points(file) == POINTS[:-1]


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("all_to_all", 0.75), ("scatter", 0.75), ("broadcast", 1.0)],
)
def test_bus_bandwidth_has_the_factors_of_nccl_tests(kind: str, factor: float) -> None:
    """github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md, "Summary"; scatter from src/scatter.cu."""
    point = CollectivePoint(kind, 4, 1_000_000, 1e-3, 20, 0)
    assert point.algorithm_bandwidth == 1e9
    assert point.bus_bandwidth == pytest.approx(factor * 1e9)


def test_a_message_has_the_bandwidth_of_its_link() -> None:
    assert CollectivePoint("send_recv", 2, 1_000_000, 1e-3, 20, 0).bus_bandwidth == 1e9


def test_what_is_hidden_is_a_share_of_the_shorter() -> None:
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=2.0).overlap == 1
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=3.0).overlap == 0
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=2.25).overlap == 0.75
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=4.0).overlap == -1


def test_a_layers_flops_are_its_kernels() -> None:
    assert LAYER.flops == 2e6
