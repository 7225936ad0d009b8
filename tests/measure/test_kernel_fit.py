"""From layers' times to kernels' rates, and back."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlab.hardware import AlphaBeta, Cluster, Machine, Profile, Rate
from shardlab.measure.kernel_fit import BESIDE, Rates, errors_by_layer, errors_of, fit_kernels, predict
from shardlab.measure.points import LayerPoint
from shardlab.measure.shapes import MEASURED, Shape, subjects
from shardlab.models import CutModel
from shardlab.program import OpKind

SHAPES = [Shape(width, *batch) for width in (32, 64, 128, 256) for batch in ((1, 32), (4, 64), (2, 256))]


def points_of(shapes: list[Shape], dtype: str = "float32") -> list[LayerPoint]:
    """What a bench measures, without the times."""
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


def timed(points: list[LayerPoint], rates: Rates) -> list[LayerPoint]:
    return [replace(point, seconds=predict(point, rates)) for point in points]


@settings(max_examples=5)
@given(st.integers(0, 2**32), st.floats(1e-6, 1e-4), st.floats(1e9, 1e13))
def test_layers_made_of_known_rates_are_predicted_exactly(seed: int, launch: float, flops: float) -> None:
    slower = [1 + (seed >> number) % 5 for number in range(len(FAMILIES))]
    rates: Rates = {
        (family, "float32"): Rate(launch * slow, flops / slow, flops / 10 / slow)
        for family, slow in zip(FAMILIES, slower, strict=True)
    }
    rates |= {(f"op:{op.value}", "float32"): Rate(launch / 3, 0, 0) for op in MEASURED if op.value in BESIDE}
    points = timed(POINTS, rates)
    assert errors_of(points, fit_kernels(points)).worst < 1e-6


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


def test_errors_are_told_by_layer_and_op() -> None:
    found = errors_by_layer(POINTS, fit_kernels(POINTS))
    assert {("mlp", "forward"), ("block", "backward"), ("norm", "backward_weight"), ("loss", "loss")} < set(found)
    assert sum(errors.points for errors in found.values()) == len(POINTS)
