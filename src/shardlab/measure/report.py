"""JSON of a bench: all points that were measured, and the fits that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from shardlab.hardware.profile import rate_rows
from shardlab.measure.kernel_fit import errors_by_layer, errors_of, fit_kernels
from shardlab.measure.lines import fit_lines
from shardlab.measure.points import CollectivePoint, LayerPoint, OverlapPoint, PeakPoint, Point
from shardlab.measure.saving import this_machine


def as_json(points: Sequence[Point]) -> dict[str, Any]:
    """Seconds, bytes, FLOPs and bytes/s throughout; errors are relative."""
    return {
        "machine": asdict(this_machine()),
        "collectives": [
            {
                **asdict(point),
                "algorithm_bandwidth": point.algorithm_bandwidth,
                "bus_bandwidth": point.bus_bandwidth,
                "cs336_bandwidth": point.cs336_bandwidth,  # in GiB/s
            }
            for point in points
            if isinstance(point, CollectivePoint)
        ],
        "overlap": [{**asdict(point), "overlap": point.overlap} for point in points if isinstance(point, OverlapPoint)],
        "fits": collective_fits(points),
        "peaks": [asdict(point) for point in points if isinstance(point, PeakPoint)],
        "layers": [{**asdict(point), "flops": point.flops} for point in points if isinstance(point, LayerPoint)],
        "kernels": [_kernels(crowd) for crowd in crowds(points)],
    }


def collective_fits(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Alpha and beta of every collective and group size, how well they tell the points, and why not to rely on it."""
    return [
        {"kind": kind, "ranks": ranks, **asdict(fitted.line), "errors": asdict(fitted.errors), "doubt": fitted.doubt}
        for (kind, ranks), fitted in fit_lines(points).items()
    ]


def crowds(points: Sequence[Point]) -> list[list[LayerPoint]]:
    """The layers that were measured with equally many processes, the most first."""
    layers = [point for point in points if isinstance(point, LayerPoint)]
    counts = sorted({point.processes for point in layers}, reverse=True)
    return [[point for point in layers if point.processes == count] for count in counts]


def _kernels(layers: Sequence[LayerPoint]) -> dict[str, Any]:
    rates = fit_kernels(layers)
    by_layer = errors_by_layer(layers, rates)
    return {
        "processes": layers[0].processes,
        "rates": rate_rows(rates),
        "errors": asdict(errors_of(layers, rates)),
        "errors_by_layer": [{"layer": layer, "op": op, **asdict(e)} for (layer, op), e in by_layer.items()],
    }
