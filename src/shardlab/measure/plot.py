"""Figures of measurements: bandwidth of collectives, speed of layers, and comparisons of strategies."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from shardlab.common.files import atomic_file
from shardlab.common.text import size_text
from shardlab.draw.canvas import style
from shardlab.measure.fits import CollectivePoint, LayerPoint, PeakPoint, Point, fit_lines
from shardlab.measure.side_by_side.results import Comparison, Parts, StrategyPair

GIGA = 1e9
MARKS = ("o", "s", "^", "v", "D", "P", "X", "<", ">", "*")


def plot_collectives(points: Sequence[Point], path: Path) -> None:
    """Draw times with the fitted lines, and bus bandwidths below them, with a column for each group size."""
    measured = [point for point in points if isinstance(point, CollectivePoint) and point.bytes]
    groups = sorted({point.ranks for point in measured})
    lines = fit_lines(measured)
    with style():
        figure, axes = _panels(2, max(1, len(groups)))
        for column, ranks in enumerate(groups):
            time_axis, bandwidth_axis = axes[0][column], axes[1][column]
            of_group = [point for point in measured if point.ranks == ranks]
            for number, kind in enumerate(dict.fromkeys(point.kind for point in of_group)):
                kind_points = [point for point in of_group if point.kind == kind]
                sizes = [point.bytes for point in kind_points]
                color, mark = f"C{number}", MARKS[number % len(MARKS)]
                time_axis.plot(sizes, [point.seconds for point in kind_points], mark, ms=3.5, color=color, label=kind)
                time_axis.plot(sizes, [lines[kind, ranks].line.seconds(size) for size in sizes], lw=0.8, color=color)
                bus = [point.bus_bandwidth / GIGA for point in kind_points]
                bandwidth_axis.plot(sizes, bus, marker=mark, ms=3.5, lw=0.8, color=color)
            time_axis.set(title=f"{ranks} ranks", ylabel="seconds (lines: fit)", xscale="log", yscale="log")
            time_axis.legend(frameon=False, fontsize=6)
            bandwidth_axis.set(ylabel="bus bandwidth, GB/s", xlabel="size", xscale="log", yscale="log")
            for axis in (time_axis, bandwidth_axis):
                _ticks(axis.set_xticks, [point.bytes for point in of_group], size_text)
        save_figure(figure, path)


def plot_compute(points: Sequence[Point], path: Path) -> None:
    """Draw FLOP/s over FLOPs by layer, with a panel for forward and one for backward passes."""
    layers = [point for point in points if isinstance(point, LayerPoint) and point.flops]
    processes = max((point.processes for point in layers), default=1)
    with style():
        figure, axes = _panels(1, 2)
        for axis, op in zip(axes[0], ("forward", "backward"), strict=True):
            op_points = [point for point in layers if point.op == op and point.processes == processes]
            for number, layer in enumerate(dict.fromkeys(point.layer for point in op_points)):
                of_layer = [point for point in op_points if point.layer == layer]
                rates = [point.flops / point.seconds / GIGA for point in of_layer]
                mark = MARKS[number % len(MARKS)]
                axis.plot([point.flops for point in of_layer], rates, mark, ms=3.5, label=layer)
            for peak in points:
                if isinstance(peak, PeakPoint) and peak.processes == processes:
                    axis.axhline(peak.flops / GIGA, lw=0.8, color="0.5")
                    axis.annotate(f"peak, {peak.dtype}", (0.02, peak.flops / GIGA), xycoords=("axes fraction", "data"))
            axis.set(title=f"{op}, {processes} at once", xlabel="FLOPs", ylabel="GFLOP/s", xscale="log", yscale="log")
            axis.legend(frameon=False, fontsize=6)
        save_figure(figure, path)


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as SVG, PNG or PDF, by its suffix.

    The metadata name Shardlab as the creator, by which a later command recognizes a file that it may overwrite.
    """
    with atomic_file(path) as part:
        figure.savefig(part, format=path.suffix[1:], metadata={"Creator": "shardlab"})


COLORS = ("#54aeff", "#d4a72c", "#d0d7de")
"""Colors of compute, overhead and waiting."""


def plot_strategies(pairs_of: Mapping[str, list[tuple[StrategyPair, Comparison]]], paths: list[Path]) -> None:
    """Draw the steps of each strategy, ours above PyTorch's, in units of PyTorch's median, in a panel for each size."""
    with style():
        rows = max(map(len, pairs_of.values()))
        figure = Figure(figsize=(4.6 * len(pairs_of), 0.7 + 0.55 * rows), layout="constrained")
        axes = figure.subplots(1, len(pairs_of), squeeze=False)[0]
        for axis, (title, pairs) in zip(axes, pairs_of.items(), strict=True):
            _panel(axis, title, pairs)
        figure.supxlabel("time of a step over PyTorch's: ours above, PyTorch's below", fontsize=8)
        for path in paths:
            save_figure(figure, path)


def _panels(rows: int, columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.2 * columns, 3.2 * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def _ticks(set_ticks: Callable[..., Any], sizes: Sequence[int], text: Callable[[float], str]) -> None:
    ticks = sorted(set(sizes))
    ticks = ticks[:: max(1, len(ticks) // 5)]
    set_ticks(ticks, [text(size) for size in ticks])
    set_ticks([], minor=True)


def _panel(axis: Any, title: str, pairs: list[tuple[StrategyPair, Comparison]]) -> None:
    for row, (_, compared) in enumerate(pairs):
        unit = median(compared.theirs.seconds)
        for y, side in ((row - 0.2, compared.ours), (row + 0.2, compared.theirs)):
            left_edge = 0.0
            for name, color, part in zip(Parts._fields, COLORS, side.parts(compared.plain), strict=True):
                label = name if row == 0 and side is compared.ours else None
                axis.barh(y, max(0.0, part) / unit, 0.36, left_edge, color=color, label=label)
                left_edge += max(0.0, part) / unit
        low, middle, high = compared.ratio
        axis.errorbar(middle, row - 0.2, xerr=[[middle - low], [high - middle]], fmt="o", ms=3, color="#24292f")
    axis.axvline(1.0, lw=0.8, color="0.5")
    names = [f"{pair.name}\n{pair.theirs}" for pair, _ in pairs]
    axis.set_yticks(range(len(pairs)), names)
    axis.invert_yaxis()
    axis.set_title(title, pad=16)
    axis.legend(frameon=False, fontsize=6, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
