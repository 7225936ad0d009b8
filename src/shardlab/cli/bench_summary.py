"""Output of the benches: one screen, and with --verbose every point before it (see `bench_tables`)."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rich.console import Console

from shardlab.cli.bench_tables import GIGA, MICRO, hidden_text, print_layers, print_overlap, print_rates, print_sizes
from shardlab.cli.console import print_fact, stdout_console, table_of
from shardlab.measure.kernel_fit import errors_of, fit_kernels
from shardlab.measure.lines import FittedLine, fit_lines
from shardlab.measure.points import CollectivePoint, LayerPoint, OverlapPoint, PeakPoint, Point
from shardlab.measure.regression import FitErrors
from shardlab.measure.report import crowds
from shardlab.measure.sizes import size_text


def print_collectives(points: Sequence[Point], verbose: bool = False, console: Console | None = None) -> None:
    """A row for each collective: its time at both ends, its bandwidth, and latency and bandwidth of the fitted line."""
    console = console or stdout_console()
    measured = [point for point in points if isinstance(point, CollectivePoint)]
    beside = [point for point in points if isinstance(point, OverlapPoint)]
    fits = fit_lines(points)
    if verbose:
        print_sizes(console, measured)
        print_overlap(console, beside)
    sizes = sorted({point.bytes for point in measured if point.bytes} or {0})
    ends = list(dict.fromkeys(size_text(size) for size in (sizes[0], sizes[-1])))
    for ranks in sorted({point.ranks for point in measured}):
        times = [f"us at {end}" for end in ends]
        table = table_of(f"{ranks} ranks", *times, "bus GB/s", "latency us", "GB/s", "error", "hidden", gap=1)
        for kind in dict.fromkeys(point.kind for point in measured if point.ranks == ranks):
            mine = [point for point in measured if (point.kind, point.ranks) == (kind, ranks)]
            hidden = [point.overlap for point in beside if (point.kind, point.ranks) == (kind, ranks)]
            overlap = hidden_text(median(hidden)) if hidden else "-"
            table.add_row(kind, *_times(mine, len(times)), *_line(fits.get((kind, ranks))), overlap)
        console.print(table)
        console.print()
    print_fact(console, "us, bus GB/s", f"called alone; bandwidth at {ends[-1]}, as nccl-tests reckons it")
    print_fact(console, "latency, GB/s", "of the line through what it adds to a step at each size; the profile has it")
    print_fact(console, "error", "half of the sizes are nearer to that line than this")
    if beside:
        text = "of what could be, beside compute (median over sizes); none: they slow each other down"
        print_fact(console, "hidden", text)
    wrong = [point for point in measured if point.wrong]
    for point in wrong:
        text = f"{point.wrong} elements of {point.kind} among {point.ranks} ranks at {size_text(point.bytes)}"
        print_fact(console, "wrong", text, "bold red")
    if not wrong:
        print_fact(console, "results", "right at every size")
    _print_doubts(console, fits)


def _times(points: Sequence[CollectivePoint], count: int) -> list[str]:
    """Microseconds at the smallest and the largest size, and the bus bandwidth there."""
    first, last = points[0], points[-1]
    if not last.bytes:  # a barrier has no size
        return [f"{first.seconds / MICRO:,.0f}", *["-"] * count]
    times = [f"{point.seconds / MICRO:,.0f}" for point in (first, last)[:count]]
    return [*times, f"{last.bus_bandwidth / GIGA:.3f}"]


def _line(fitted: FittedLine | None) -> tuple[str, str, str]:
    if fitted is None:
        return "-", "-", "-"
    bandwidth = f"{1 / fitted.line.beta / GIGA:.3f}" if fitted.line.beta else "-"
    return f"{fitted.line.alpha / MICRO:,.0f}", bandwidth, f"{fitted.errors.median:.0%}"


def _print_doubts(console: Console, fits: dict[tuple[str, int], FittedLine]) -> None:
    """Each reason to doubt a line, with the collectives that it is about."""
    several = len({ranks for _, ranks in fits}) > 1
    for reason in dict.fromkeys(fitted.doubt for fitted in fits.values() if fitted.doubt):
        keys = [key for key, fitted in fits.items() if fitted.doubt == reason]
        doubted = [f"{kind} of {ranks}" if several else kind for kind, ranks in keys]
        print_fact(console, "doubtful", f"{', '.join(doubted)}: {reason}", "yellow")


def print_compute(points: Sequence[Point], verbose: bool = False, console: Console | None = None) -> None:
    """Layers at the largest size, as a share of the peak; the peaks; how well the fitted kernels tell the timings."""
    console = console or stdout_console()
    peaks = {(point.dtype, point.processes): point for point in points if isinstance(point, PeakPoint)}
    groups = crowds(points)
    if verbose:
        for layers in groups:
            print_layers(console, layers, peaks)
            print_rates(console, layers)
    elif groups:
        largest = max(groups[0], key=lambda point: (point.width, point.rows * point.tokens))
        shape = (largest.width, largest.rows, largest.tokens)
        print_layers(console, [p for p in groups[0] if (p.width, p.rows, p.tokens) == shape], peaks)
    for peak in peaks.values():
        found = f"{peak.flops / GIGA:,.1f} GFLOP/s each, {peak.processes} at once, in {peak.dtype}"
        print_fact(console, "peak", f"{found}: the fastest product of matrices, {peak.size} x {peak.size}")
    for layers in groups:
        errors = errors_of(layers, fit_kernels(layers))
        print_fact(console, "fit", f"{layers[0].processes} at once: {_errors_text(errors)}")
    over = [point for point in _with_flops(points) if point.flops > 1.05 * point.seconds * _peak_of(point, peaks)]
    if over:
        text = "faster than the peak; the machine was busy while that was measured: measure again"
        print_fact(console, "doubtful", f"{len(over)} timings are {text}", "yellow")


def _errors_text(errors: FitErrors) -> str:
    return f"of {errors.points} timings half are within {errors.median:.0%} of it, the worst is {errors.worst:.0%} off"


def _with_flops(points: Sequence[Point]) -> list[LayerPoint]:
    return [point for point in points if isinstance(point, LayerPoint) and point.flops]


def _peak_of(point: LayerPoint, peaks: dict[tuple[str, int], PeakPoint]) -> float:
    peak = peaks.get((point.dtype, point.processes))
    return peak.flops if peak else float("inf")
