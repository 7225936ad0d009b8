"""Output of `shardlab bench`: one screen, preceded with --verbose by tables of every point and every rate.

`add_collectives` and `add_compute` show the measurements of the profile and the quality of its fit. `add_rows` shows
the ratios of `shardlab bench strategies`, and the parts of each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from statistics import median

from shardlab.cli.console import Report, table_of
from shardlab.common.text import size_text
from shardlab.measure.fits import (
    CollectivePoint,
    FitErrors,
    FittedLine,
    LayerPoint,
    OverlapPoint,
    PeakPoint,
    Point,
    errors_by_layer,
    fit_kernels,
    fit_lines,
    rate_errors,
)
from shardlab.measure.profile import crowds
from shardlab.measure.side_by_side.results import PairRow, ratios

GIGA = 1e9

MICRO = 1e-6

PASSES = ("forward", "backward", "backward_input", "backward_weight", "update")

MILLI = 1e-3


def add_collectives(report: Report, points: Sequence[Point], verbose: bool = False) -> None:
    """Add a row for each collective: its times at the smallest and largest size, its bandwidth, and its fitted line.

    Args:
        verbose: whether to add every size first.
    """
    measured = [point for point in points if isinstance(point, CollectivePoint)]
    overlap_points = [point for point in points if isinstance(point, OverlapPoint)]
    fits = fit_lines(points)
    if verbose:
        add_sizes(report, measured)
        add_overlap(report, overlap_points)
    sizes = sorted({point.bytes for point in measured if point.bytes} or {0})
    ends = list(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))
    for ranks in sorted({point.ranks for point in measured}):
        times = [f"us at {end}" for end in ends]
        table = table_of(f"{ranks} ranks", *times, "bus GB/s", "latency us", "GB/s", "error", "hidden", gap=1)
        for kind in dict.fromkeys(point.kind for point in measured if point.ranks == ranks):
            kind_points = [point for point in measured if (point.kind, point.ranks) == (kind, ranks)]
            hidden = [point.overlap for point in overlap_points if (point.kind, point.ranks) == (kind, ranks)]
            overlap = hidden_text(median(hidden)) if hidden else "-"
            table.add_row(kind, *_times(kind_points, len(times)), *_line(fits.get((kind, ranks))), overlap)
        report.line(table)
        report.line()
    report.fact("us, bus GB/s", f"called repeatedly, alone; bandwidth at {ends[-1]}, computed as in nccl-tests")
    report.fact("latency, GB/s", "of the line fitted to the time that it adds to a step; saved in the profile")
    report.fact("error", "median deviation of the sizes from that line")
    if overlap_points:
        text = "share of the shorter one, if it runs beside compute (median over sizes); none: both get slower"
        report.fact("hidden", text)
    wrong_points = [point for point in measured if point.wrong]
    for point in wrong_points:
        text = f"{point.wrong} elements of {point.kind} among {point.ranks} ranks at {size_text(point.bytes)}"
        report.fact("wrong", text, style="bold red")
    if not wrong_points:
        report.fact("results", "correct at every size")
    _add_doubts(report, fits)


def add_compute(report: Report, points: Sequence[Point], verbose: bool = False) -> None:
    """Add the speed of each layer at the largest size as a share of the peak, the peaks, and the errors of the fit.

    Args:
        verbose: whether to add every layer and every rate first.
    """
    peaks = {(point.dtype, point.processes): point for point in points if isinstance(point, PeakPoint)}
    groups = crowds(points)
    if verbose:
        for layers in groups:
            add_layers(report, layers, peaks)
            add_rates(report, layers)
    elif groups:
        largest = max(groups[0], key=lambda point: (point.width, point.rows * point.tokens))
        shape = (largest.width, largest.rows, largest.tokens)
        add_layers(report, [p for p in groups[0] if (p.width, p.rows, p.tokens) == shape], peaks)
    for peak in peaks.values():
        threads = "" if peak.threads == 1 else f" on {peak.threads} threads"
        speed = f"{peak.flops / GIGA:,.1f} GFLOP/s each, {peak.processes} at once{threads}, in {peak.dtype}"
        report.fact("peak", f"{speed}: the fastest product of matrices, {peak.size} x {peak.size}")
    for layers in groups:
        errors = rate_errors(layers, fit_kernels(layers))
        text = f"median error {errors.median:.0%}, largest {errors.worst:.0%}, of {errors.points} timings"
        report.fact("fit", f"{layers[0].processes} at once: {text}")
    layer_points = [point for point in points if isinstance(point, LayerPoint) and point.flops]
    too_fast = [point for point in layer_points if point.flops > 1.05 * point.seconds * _peak_of(point, peaks)]
    if too_fast:
        text = "faster than the peak, because the machine was busy when the peak was measured; measure again"
        report.fact("doubtful", f"{len(too_fast)} timings are {text}", style="yellow")


def add_rows(report: Report, rows: Sequence[PairRow], ranks: int) -> None:
    """Add the tables of each size, and below them the pairs that were not compared."""
    for title, of_size in groupby(rows, lambda row: row.size.title(ranks)):
        size_rows = list(of_size)
        report.line(f"[bold]{title}[/]\n")
        if any(row.compared for row in size_rows):
            _add_ratios(report, size_rows)
            _add_parts(report, size_rows)
            _add_passes(report, size_rows)
        missing = [row for row in size_rows if row.compared is None]
        for row in missing:
            report.fact(row.pair.name, f"not compared: {row.why_not.splitlines()[-1]}", style="yellow")
        if missing:
            report.line()
    report.line(
        "[dim]time, memory: ours divided by PyTorch's; middle half: range of half of the ratios\n"
        "memory: peak bytes of tensor storages in a step, parameters included\n"
        "plain step: a rank's share of the work in plain PyTorch, without communication\n"
        "compute: CPU time of the plain step; overhead: CPU time of a rank beyond that\n"
        "waiting: time in which the rank's thread uses no core[/]"
    )


def add_sizes(report: Report, measured: Sequence[CollectivePoint]) -> None:
    """Add every collective at every size, as measured by repeated calls."""
    table = table_of("collective", "ranks", "size", "time us", "alg GB/s", "bus GB/s", "wrong", gap=1)
    for point, previous in zip(measured, [None, *measured], strict=False):
        if previous is not None and (previous.kind, previous.ranks) != (point.kind, point.ranks):
            table.add_row()
        bandwidths = (f"{bandwidth / GIGA:.3f}" for bandwidth in (point.algorithm_bandwidth, point.bus_bandwidth))
        table.add_row(
            point.kind,
            str(point.ranks),
            *((size_text(point.bytes),) if point.bytes else ("-",)),
            f"{point.seconds / MICRO:,.1f}",
            *(bandwidths if point.bytes else ("-", "-")),
            f"[bold red]{point.wrong}[/]" if point.wrong else "0",
        )
    report.line(table)
    report.line()


def add_overlap(report: Report, points: Sequence[OverlapPoint]) -> None:
    """Add a table of the time by which each collective lengthens a step, and the share that compute hides."""
    if not points:
        return
    table = table_of("in a step", "ranks", "size", "compute us", "adds us", "both us", "hidden", gap=1)
    for point in points:
        times = (f"{seconds / MICRO:,.0f}" for seconds in (point.compute, point.communication, point.together))
        size = size_text(point.bytes) if point.bytes else "-"
        table.add_row(point.kind, str(point.ranks), size, *times, hidden_text(point.overlap))
    report.line(table)
    report.line(
        "[dim]adds: time that the collective adds if it is awaited at once; both: compute runs before the wait\n"
        "hidden: share of the shorter of the two; 0%: as long as one after the other; none: longer[/]\n"
    )


def hidden_text(share: float) -> str:
    """Return a hidden share as text. Shares below 0 or above 1, which come from timing noise, are clipped."""
    return "none" if share < 0 else f"{min(share, 1.0):.0%}"


def add_layers(report: Report, layers: Sequence[LayerPoint], peaks: dict[tuple[str, int], PeakPoint]) -> None:
    """Add every layer that has a forward pass, at every size."""
    report.line(
        f"[bold]{layers[0].processes} at once[/], in microseconds, and as a share of the peak; input, weight: halves "
        "of a backward pass"
    )
    heads = ("forward", "peak", "backward", "peak", "input", "weight", "update")
    table = table_of("layer", "width", "batch", *heads, gap=1)
    rows: dict[tuple[str, int, int, int, str], dict[str, LayerPoint]] = {}
    for point in layers:
        key = (point.layer, point.width, point.rows, point.tokens, point.dtype)
        rows.setdefault(key, {}).setdefault("forward" if point.op == "loss" else point.op, point)
    sizes = len({key[1:] for key in rows})
    previous_layer = ""
    for (layer, width, sequences, tokens, dtype), ops in sorted(rows.items(), key=lambda row: row[0]):
        if not ops.keys() & set(PASSES):  # drawing a batch or adding a gradient, which only the fit uses
            continue
        if previous_layer and layer != previous_layer and sizes > 1:
            table.add_row()
        previous_layer = layer
        cells: list[str] = []
        for op in PASSES:
            point = ops.get(op)
            cells.append(f"{point.seconds / MICRO:,.0f}" if point else "-")
            if op in ("forward", "backward"):
                peak = peaks.get((dtype, layers[0].processes))
                has_share = point is not None and peak is not None and point.flops
                cells.append(f"{point.flops / point.seconds / peak.flops:.0%}" if has_share else "-")  # pyright: ignore
        table.add_row(layer, str(width), f"{sequences} x {tokens}", *cells)
    report.line(table)
    report.line()


def add_rates(report: Report, layers: Sequence[LayerPoint]) -> None:
    """Add the fitted rates of each kind of kernel, and the errors of the fit for each layer."""
    rates = fit_kernels(layers)
    table = table_of(f"fit, {layers[0].processes} at once", "dtype", "launch us", "GFLOP/s", "GB/s", words=2, gap=1)
    for (family, dtype), rate in sorted(rates.items()):
        numbers = (f"{number / GIGA:,.1f}" if number else "-" for number in (rate.flops, rate.bytes))
        table.add_row(family, dtype, f"{rate.launch / MICRO:,.1f}" if rate.launch else "-", *numbers)
    report.line()
    report.line(table)
    report.line()
    errors = table_of("errors of that fit", "points", "median", "worst", gap=1)
    for (layer, op), layer_errors in sorted(errors_by_layer(layers, rates).items()):
        errors.add_row(f"{layer}, {op.replace('_', ' ')}", *_errors(layer_errors))
    errors.add_row()
    errors.add_row("all", *_errors(rate_errors(layers, rates)))
    report.line(errors)
    report.line()


def _errors(errors: FitErrors) -> tuple[str, str, str]:
    return str(errors.points), f"{errors.median:.0%}", f"{errors.worst:.0%}"


def _times(points: Sequence[CollectivePoint], count: int) -> list[str]:
    """Return the microseconds at the smallest and the largest size, and the bus bandwidth at the largest."""
    first, last = points[0], points[-1]
    if not last.bytes:  # a barrier has no size
        return [f"{first.seconds / MICRO:,.0f}", *["-"] * count]
    times = [f"{point.seconds / MICRO:,.0f}" for point in (first, last)[:count]]
    return [*times, f"{last.bus_bandwidth / GIGA:.3f}"]


def _line(fit: FittedLine | None) -> tuple[str, str, str]:
    if fit is None:
        return "-", "-", "-"
    bandwidth = f"{1 / fit.line.beta / GIGA:.3f}" if fit.line.beta else "-"
    return f"{fit.line.alpha / MICRO:,.0f}", bandwidth, f"{fit.errors.median:.0%}"


def _add_doubts(report: Report, fits: dict[tuple[str, int], FittedLine]) -> None:
    """Add each reason to doubt fitted lines, with the collectives of these lines."""
    several = len({ranks for _, ranks in fits}) > 1
    for reason in dict.fromkeys(fit.doubt for fit in fits.values() if fit.doubt):
        keys = [key for key, fit in fits.items() if fit.doubt == reason]
        labels = [f"{kind} of {ranks}" if several else kind for kind, ranks in keys]
        report.fact("doubtful", f"{', '.join(labels)}: {reason}", style="yellow")


def _peak_of(point: LayerPoint, peaks: dict[tuple[str, int], PeakPoint]) -> float:
    peak = peaks.get((point.dtype, point.processes))
    return peak.flops if peak else float("inf")


def _add_ratios(report: Report, rows: Sequence[PairRow]) -> None:
    table = table_of("ours", "PyTorch's", "layers", "time", "middle half", "memory", words=2)
    for row in rows:
        if (comparison := row.compared) is None:
            continue
        ratio = comparison.ratio
        table.add_row(
            row.pair.name,
            row.pair.theirs,
            str(row.size.model.layers),
            f"[bold]{ratio.median:.2f}[/]",
            f"{ratio.low:.2f}-{ratio.high:.2f}",
            f"{comparison.memory:.2f}",
        )
    report.line(table)
    report.line()


def _add_passes(report: Report, rows: Sequence[PairRow]) -> None:
    """Add the passes that rewrote our programs."""
    pairs = [row.pair for row in rows if row.compared and row.pair.passes != "none"]
    for pair in pairs:
        report.fact(pair.name, f"after {pair.passes}")
    if pairs:
        report.line()


def _add_parts(report: Report, rows: Sequence[PairRow]) -> None:
    table = table_of("step of", "", "ms", "compute", "overhead", "waiting", "over plain", words=2)
    for row in rows:
        if (comparison := row.compared) is None:
            continue
        for name, owner, side in ((row.pair.name, "ours", comparison.ours), ("", "PyTorch's", comparison.theirs)):
            cells = (median(side.seconds), *side.parts(comparison.plain))
            plain_ratio = ratios(side, comparison.plain).median
            table.add_row(name, owner, *(f"{time / MILLI:,.1f}" for time in cells), f"{plain_ratio:.2f}")
    report.line(table)
    report.line()
