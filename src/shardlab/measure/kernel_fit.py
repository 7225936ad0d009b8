"""Fits the rates of kernels to the times of layers: a layer takes the sum of what its kernels take.

time = (what the op takes beside its kernels) + sum over kernels of (launch + FLOPs / rate + bytes / bandwidth), all of
them 0 or more; one equation for every measured layer, solved by least squares of the relative error.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from shardlab.hardware import Rate
from shardlab.measure.points import KernelWork, LayerPoint
from shardlab.measure.regression import Array, FitErrors, fit_relative

Rates = dict[tuple[str, str], Rate]
"""Rates by family and dtype, as in `hardware.Profile`."""

POINTWISE = "pointwise:"

BESIDE = ("forward", "backward", "backward_input", "backward_weight", "load_batch")
"""The ops that take time beside kernels, to build or walk a graph or to draw tokens; others have but one kernel."""


def fit_kernels(points: Sequence[LayerPoint]) -> Rates:
    """The rates of every family in every dtype, from layers that were measured with equally many processes.

    What a pointwise kernel takes that was not measured is fitted too, as if all those that were measured were one.
    """
    rates: Rates = {}
    for dtype in sorted({point.dtype for point in points}):
        of_dtype = [point for point in points if point.dtype == dtype]
        alike = _fit(of_dtype, any_pointwise=True)
        apart = _fit(of_dtype, any_pointwise=False)
        rates |= {(family, dtype): rate for family, rate in (alike | apart).items()}
    return rates


def predict(point: LayerPoint, rates: Rates) -> float:
    """How long a layer takes by these rates, in seconds."""
    own = rates.get((f"op:{point.op}", point.dtype))
    kernels = (rates[family, point.dtype].seconds(flops, bytes) for family, flops, bytes in point.kernels)
    return (own.launch if own else 0.0) + sum(kernels)


def errors_by_layer(points: Sequence[LayerPoint], rates: Rates) -> dict[tuple[str, str], FitErrors]:
    """How well the rates predict what they were fitted to, by layer and op."""
    groups: dict[tuple[str, str], list[LayerPoint]] = defaultdict(list)
    for point in points:
        groups[point.layer, point.op].append(point)
    return {key: errors_of(group, rates) for key, group in groups.items()}


def errors_of(points: Sequence[LayerPoint], rates: Rates) -> FitErrors:
    """How well the rates predict all points together."""
    return FitErrors.between([predict(point, rates) for point in points], [point.seconds for point in points])


def _fit(points: Sequence[LayerPoint], any_pointwise: bool) -> dict[str, Rate]:
    families: dict[str, None] = {}
    for point in points:
        own = [f"op:{point.op}"] if point.op in BESIDE else []
        families |= dict.fromkeys([*own, *(_family(kernel, any_pointwise) for kernel in point.kernels)])
    place = {family: number for number, family in enumerate(families)}
    matrix: Array = np.zeros((len(points), len(place), 3))
    for row, point in zip(matrix, points, strict=True):
        if point.op in BESIDE:
            row[place[f"op:{point.op}"], 0] = 1
        for kernel in point.kernels:
            row[place[_family(kernel, any_pointwise)]] += (1, *kernel[1:])
    measured = np.array([point.seconds for point in points])
    found = fit_relative(matrix.reshape(len(points), -1), measured).reshape(-1, 3)
    return {
        family: Rate(float(launch), float(1 / flop) if flop else 0.0, float(1 / byte) if byte else 0.0)
        for family, (launch, flop, byte) in zip(families, found, strict=True)
    }


def _family(kernel: KernelWork, any_pointwise: bool) -> str:
    family = kernel[0]
    if any_pointwise and family.startswith(POINTWISE):
        return "pointwise_backward" if family.endswith("_backward") else "pointwise"
    return family
