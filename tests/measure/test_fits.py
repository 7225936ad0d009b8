"""Fits find the constants that made the points."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.language import OpKind
from shardlab.measure.fits import (
    MEASURED,
    NO_LATENCY,
    NO_SLOPE,
    ONE_SIZE,
    OPS_WITH_OVERHEAD,
    SCATTERED,
    CollectivePoint,
    FitErrors,
    LayerPoint,
    OverlapPoint,
    PeakPoint,
    Point,
    Rates,
    Shape,
    alpha_beta,
    append,
    errors_by_layer,
    fit_kernels,
    fit_line,
    fit_relative,
    nonnegative_least_squares,
    predict,
    rate_errors,
    read_points,
    subjects,
)
from shardlab.models import CutModel
from shardlab.simulate.hardware import AlphaBeta, Cluster, Machine, Profile, Rate

SIZES = [1024 * 4**step for step in range(9)]


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-8))
def test_latency_and_bandwidth_are_found_again(alpha: float, beta: float) -> None:
    fitted = alpha_beta(SIZES, [alpha + beta * size for size in SIZES])
    for size in SIZES:
        assert fitted[0] + fitted[1] * size == pytest.approx(alpha + beta * size, rel=1e-6)


@given(st.floats(1e-5, 1e-3), st.floats(1e-10, 1e-8), st.integers(0, len(SIZES) - 1))
def test_one_point_on_a_busy_machine_moves_them_little(alpha: float, beta: float, late: int) -> None:
    seconds = [alpha + beta * size for size in SIZES]
    fitted = alpha_beta(SIZES, [10 * time if i == late else time for i, time in enumerate(seconds)])
    others = [i for i in range(len(SIZES)) if i != late]
    errors = FitErrors.compare([fitted[0] + fitted[1] * SIZES[i] for i in others], [seconds[i] for i in others])
    assert errors.median < 0.1


def test_small_sizes_count_as_much_as_large_ones() -> None:
    """In seconds, the error at 64 MB would be all that matters."""
    alpha, _ = alpha_beta([*SIZES, 64 << 20], [*(1e-4 + 1e-9 * size for size in SIZES), 0.08])
    assert alpha == pytest.approx(1e-4, rel=0.2)


def test_one_size_alone_is_all_latency() -> None:
    assert alpha_beta([0, 0, 0], [1.0, 2.0, 9.0]) == (2.0, 0.0)


def systems(rows: int, columns: int) -> st.SearchStrategy[tuple[list[list[float]], list[float]]]:
    numbers = st.floats(-10, 10, allow_subnormal=False).map(lambda x: round(x, 3))
    line = st.lists(numbers, min_size=columns, max_size=columns)
    return st.tuples(st.lists(line, min_size=rows, max_size=rows), st.lists(numbers, min_size=rows, max_size=rows))


@given(systems(6, 3))
def test_nonnegative_least_squares_meets_the_conditions_of_an_optimum(
    system: tuple[list[list[float]], list[float]],
) -> None:
    """Karush, Kuhn and Tucker's: nothing below 0, and no way down: flat where positive, uphill where 0."""
    matrix, target = np.array(system[0]), np.array(system[1])
    x = nonnegative_least_squares(matrix, target)
    uphill = matrix.T @ (matrix @ x - target)
    scale = 1 + np.abs(matrix).sum() * (1 + np.abs(target).max() + np.abs(matrix @ x).max())
    assert (x >= 0).all()
    assert (uphill >= -1e-8 * scale).all()
    assert (np.abs(uphill[x > 0]) <= 1e-8 * scale).all()


@given(st.lists(st.sampled_from([0.0, 1e-6, 3e-5, 2e-4]), min_size=4, max_size=4))
def test_constants_of_any_scale_are_found_again(constants: list[float]) -> None:
    """Launches are in the order of 1e-5, seconds for each byte in that of 1e-10."""
    truth = np.array(constants) * np.array([1, 1, 1e-5, 1e-6]) + np.array([1e-6, 0, 0, 0])
    rng = np.random.default_rng(0)
    matrix = rng.integers(1, 9, (40, 4)) * 10.0 ** rng.integers(0, 3, (40, 4)) * np.array([1, 1, 1e5, 1e6])
    fitted = fit_relative(matrix, matrix @ truth)
    assert matrix @ fitted == pytest.approx(matrix @ truth, rel=1e-6)


def test_errors_are_relative_to_what_was_measured() -> None:
    assert FitErrors.compare([1.0, 3.0, 4.0], [1.0, 2.0, 5.0]) == FitErrors(0.2, 0.5, 3)


# From layers' times to kernels' rates, and back.


SHAPES = [Shape(width, *batch) for width in (32, 64, 128, 256) for batch in ((1, 32), (4, 64), (2, 256))]


def points_of(shapes: list[Shape], dtype: str = "float32") -> list[LayerPoint]:
    """Return the points of a measurement, without times."""
    points: list[LayerPoint] = []
    for subject in [subject for shape in shapes for subject in subjects(shape, dtype, 256)]:
        ops = {(op.kind, op.layer): op for op in subject.checked().program.tapes[0] if op.kind in MEASURED}
        for op in ops.values():
            elements = 0 if op.kind is OpKind.LOSS else subject.model.layout(op.layer).numel
            name, model = subject.layer_name(op), subject.model
            work = subject.work(op, elements)
            common = (model.hidden_size, subject.rows, model.seq_len, elements, dtype, 1, 1.0, 1.0)
            points.append(LayerPoint(name, op.kind.value, *common, work))
    return points


POINTS = points_of(SHAPES)
FAMILIES = sorted({family for point in POINTS for family, _, _ in point.kernels})


def with_seconds(points: list[LayerPoint], rates: Rates) -> list[LayerPoint]:
    return [replace(point, seconds=predict(point, rates)) for point in points]


@settings(max_examples=5)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e-4), st.floats(1e9, 1e13))
def test_layers_made_of_known_rates_are_predicted_exactly(seed: int, launch: float, flops: float) -> None:
    slower = [1 + (seed >> number) % 5 for number in range(len(FAMILIES))]
    rates: Rates = {
        (family, "float32"): Rate(launch * slow, flops / slow, flops / 10 / slow)
        for family, slow in zip(FAMILIES, slower, strict=True)
    }
    rates |= {(f"op:{op.value}", "float32"): Rate(launch / 3, 0, 0) for op in MEASURED if op.value in OPS_WITH_OVERHEAD}
    points = with_seconds(POINTS, rates)
    assert rate_errors(points, fit_kernels(points)).worst < 1e-6


def test_every_kernel_of_a_layer_has_a_rate_in_every_dtype() -> None:
    rates = fit_kernels([*POINTS, *points_of(SHAPES[:3], "bfloat16")])
    for dtype in ("float32", "bfloat16"):
        assert {(family, dtype) for family in FAMILIES} < set(rates)
        assert {("pointwise", dtype), ("pointwise_backward", dtype), ("op:backward", dtype)} < set(rates)


def test_a_profile_of_the_fit_prices_a_layer_as_the_fit_predicts_it() -> None:
    rates: Rates = {(family, "float32"): Rate(1e-5, 1e11, 1e10) for family in FAMILIES}
    rates["op:forward", "float32"] = Rate(5e-5, 0, 0)
    profile = Profile(Machine("a CPU", 2, "2.9", "gloo"), {}, AlphaBeta(0, 0), rates, 1e9)
    device = Cluster.of_profile(profile).device
    subject = subjects(Shape(64, 2, 32), "float32", 256)[1]
    assert isinstance(subject.model, CutModel)
    ops = [op for op in subject.checked().program.tapes[0] if op.kind is OpKind.FORWARD]
    for op in ops:
        kernels = subject.model.kernels(op.layer, 2, 32)
        point = LayerPoint("", "forward", 64, 2, 32, 0, "float32", 1, 1.0, 1.0, subject.work(op, 0))
        priced = device.overhead("forward", "float32") + sum(device.seconds(kernel, "float32") for kernel in kernels)
        assert priced == pytest.approx(predict(point, rates))


def test_errors_are_listed_by_layer_and_op() -> None:
    errors_of = errors_by_layer(POINTS, fit_kernels(POINTS))
    assert {("mlp", "forward"), ("block", "backward"), ("norm", "backward_weight"), ("loss", "loss")} < set(errors_of)
    assert sum(errors.points for errors in errors_of.values()) == len(POINTS)


# Lines through what was measured, and which of them are not to be relied on.


@given(st.floats(1e-6, 1e-2), st.floats(1e-10, 1e-8))
def test_a_clean_line_is_found_and_not_doubted(alpha: float, beta: float) -> None:
    fitted = fit_line({size: alpha + beta * size for size in SIZES})
    assert fitted.line.seconds(SIZES[4]) == pytest.approx(alpha + beta * SIZES[4], rel=1e-6)
    assert fitted.doubt is None


@given(st.lists(st.floats(1e-6, 1e-2), min_size=2, max_size=9))
def test_larger_sizes_take_longer_for_any_measurements(seconds: list[float]) -> None:
    measurements = dict(zip(SIZES, seconds, strict=False))
    fitted = fit_line(measurements)
    assert fitted.line.alpha >= 0
    assert fitted.line.beta > 0


@pytest.mark.parametrize("seconds", [[1e-3, 1e-3, 1e-3], [2e-3, 1e-3, 1e-3], [1e-3, 1.3e-3, 1.05e-3]])
def test_where_size_adds_nothing_bandwidth_is_that_of_the_largest_and_doubted(seconds: list[float]) -> None:
    fitted = fit_line(dict(zip((1024, 4096, 16384), seconds, strict=True)))
    assert fitted.line.beta == pytest.approx(seconds[-1] / 16384)
    assert fitted.line.seconds(1024) > 0.5e-3
    assert fitted.doubt == NO_SLOPE


def test_scattered_points_are_doubted() -> None:
    fitted = fit_line({size: (1e-4 + 1e-8 * size) * 4.0 ** (i % 3) for i, size in enumerate(SIZES)})
    assert fitted.doubt == SCATTERED


def test_a_line_without_latency_is_doubted() -> None:
    fitted = fit_line({1 << 20: 1e-3, 4 << 20: 5e-3})
    assert fitted.doubt == NO_LATENCY


def test_a_line_through_one_size_is_doubted() -> None:
    fitted = fit_line({1 << 20: 1e-3})
    assert fitted.line.seconds(1 << 20) == pytest.approx(1e-3)
    assert fitted.doubt == ONE_SIZE


def test_a_barrier_is_latency_alone() -> None:
    fitted = fit_line({0: 1e-3})
    assert (fitted.line.alpha, fitted.line.beta, fitted.doubt) == (1e-3, 0.0, None)


# Points are kept as they are measured, and read again.


LAYER = LayerPoint(
    "mlp", "forward", 64, 2, 32, 1024, "float32", 2, 2e-3, 1e-3, (("matmul", 2e6, 3e4), ("pointwise:gelu", 0.0, 1e4))
)
POINTS_of_points: list[Point] = [
    CollectivePoint("all_reduce", 4, 1 << 20, 1e-3, 20, 0),
    OverlapPoint("all_reduce", 4, 1 << 20, alone=2e-3, compute=1e-3, communication=2e-3, together=2.25e-3),
    LAYER,
    PeakPoint("float32", 2, 1024, 5e10),
]


def test_points_are_read_as_they_were_written(tmp_path: Path) -> None:
    for point in POINTS_of_points:
        append(tmp_path / "points", point)
    assert read_points(tmp_path / "points") == POINTS_of_points


def test_a_point_whose_writing_was_interrupted_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "points"
    assert read_points(file) == []
    for point in POINTS_of_points:
        append(file, point)
    file.write_bytes(file.read_bytes()[:-9])
    assert read_points(file) == POINTS_of_points[:-1]


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


def test_overlap_is_a_share_of_the_shorter_time() -> None:
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=2.0).overlap == 1
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=3.0).overlap == 0
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=2.25).overlap == 0.75
    assert OverlapPoint("all_reduce", 2, 8, 2.0, 1.0, 2.0, together=4.0).overlap == -1


def test_a_layers_flops_are_its_kernels() -> None:
    assert LAYER.flops == 2e6
