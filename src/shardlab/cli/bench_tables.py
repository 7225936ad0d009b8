"""What the benches print: a line for each size or layer, then what was fitted and how well it fits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from shardlab.cli.console import stdout_console
from shardlab.measure.fit import Errors
from shardlab.measure.kernel_fit import errors_by_layer, errors_of, fit_kernels
from shardlab.measure.points import CollectivePoint, LayerPoint, OverlapPoint, PeakPoint, Point
from shardlab.measure.report import collective_fits, crowds
from shardlab.measure.sizes import size_text

GIGA = 1e9
MICRO = 1e-6

PASSES = ("forward", "backward", "backward_input", "backward_weight", "update")


def print_collectives(points: Sequence[Point], console: Console | None = None) -> None:
    """Every collective at every size, how much of it is hidden, and its latency and bandwidth."""
    console = console or stdout_console()
    measured = [point for point in points if isinstance(point, CollectivePoint)]
    table = _table("collective", "ranks", "size", "time us", "alg GB/s", "bus GB/s", "CS336", "wrong", left=1)
    for point, before in zip(measured, [None, *measured], strict=False):
        if before is not None and (before.kind, before.ranks) != (point.kind, point.ranks):
            table.add_row()
        bandwidths = (f"{each / GIGA:.3f}" for each in (point.algorithm_bandwidth, point.bus_bandwidth))
        table.add_row(
            point.kind,
            str(point.ranks),
            *((size_text(point.bytes),) if point.bytes else ("-",)),
            f"{point.seconds / MICRO:,.1f}",
            *(bandwidths if point.bytes else ("-", "-")),
            f"{point.cs336_bandwidth:.3f}" if point.cs336_bandwidth is not None else "-",
            f"[bold red]{point.wrong}[/]" if point.wrong else "0",
        )
    console.print(table)
    if any(point.cs336_bandwidth is not None for point in measured):
        console.print(
            "[dim]CS336: that lecture's formulas, in 2^30 bytes/s; of an all_reduce the bus bandwidth, of a "
            "reduce_scatter the bus bandwidth over the ranks, since it counts what comes out[/]"
        )
    console.print()
    _print_overlap(console, [point for point in points if isinstance(point, OverlapPoint)])
    fits = _table("fit", "ranks", "latency us", "1/beta GB/s", "error: median", "worst", left=1)
    found = collective_fits(points)
    for fit in found:
        bandwidth = f"{1 / fit['beta'] / GIGA:.3f}" if fit["beta"] else "-"
        errors = (f"{fit['errors'][key]:.0%}" for key in ("median", "worst"))
        fits.add_row(fit["kind"], str(fit["ranks"]), f"{fit['alpha'] / MICRO:,.1f}", bandwidth, *errors)
    console.print(fits, "")
    _print_doubts(console, found)


def _print_doubts(console: Console, fits: Sequence[dict[str, Any]]) -> None:
    """Each reason to doubt a fit, with the fits that it is about."""
    reasons = list(dict.fromkeys(fit["doubt"] for fit in fits if fit["doubt"]))
    for reason in reasons:
        doubted = ", ".join(f"{fit['kind']} ({fit['ranks']})" for fit in fits if fit["doubt"] == reason)
        console.print(f"[yellow]doubtful: {doubted}: {reason}[/]", soft_wrap=True)
    if reasons:
        console.print()


def _print_overlap(console: Console, points: Sequence[OverlapPoint]) -> None:
    if not points:
        return
    table = _table("in a step", "ranks", "size", "compute us", "it adds us", "beside us", "hidden", left=1)
    for point in points:
        times = (f"{each / MICRO:,.0f}" for each in (point.compute, point.communication, point.together))
        table.add_row(point.kind, str(point.ranks), size_text(point.bytes), *times, hidden_text(point.hidden))
    console.print(table)
    console.print(
        "[dim]it adds: where it is waited for between computations; beside: computed between its start and the wait\n"
        "hidden: of the shorter of the two; 0% is one after the other, and none is slower than that[/]\n"
    )


def hidden_text(share: float) -> str:
    """The share of what could be hidden that was; timings that scatter give less than none, or more than all."""
    return "none" if share < 0 else f"{min(share, 1.0):.0%}"


def print_compute(points: Sequence[Point], console: Console | None = None) -> None:
    """Every layer at every size as a share of the peak, and the rates of the kernels."""
    console = console or stdout_console()
    peaks = {(p.dtype, p.processes): p for p in points if isinstance(p, PeakPoint)}
    groups = crowds(points)
    if groups:
        _print_layers(console, groups[0], peaks)
    for peak in peaks.values():
        console.print(
            f"peak in {peak.dtype}, {peak.processes} at once: [bold]{peak.flops / GIGA:,.1f} GFLOP/s[/] each: "
            f"measured, the fastest product of matrices ({peak.size} x {peak.size})"
        )
    for group in groups:
        _print_rates(console, group)


def _print_layers(console: Console, layers: Sequence[LayerPoint], peaks: dict[tuple[str, int], PeakPoint]) -> None:
    console.print(
        f"[bold]{layers[0].processes} at once[/], in microseconds, and as a share of the peak; a backward pass also in "
        "halves, for the input and for the weight"
    )
    heads = ("forward", "peak", "backward", "peak", "input", "weight", "update")
    table = _table("layer", "width", "batch", *heads, left=1)
    rows: dict[tuple[str, int, int, int, str], dict[str, LayerPoint]] = {}
    for point in layers:
        key = (point.layer, point.width, point.rows, point.tokens, point.dtype)
        rows.setdefault(key, {}).setdefault("forward" if point.op == "loss" else point.op, point)
    before = ""
    for (layer, width, sequences, tokens, dtype), ops in sorted(rows.items(), key=lambda row: row[0]):
        if before and layer != before:
            table.add_row()
        before = layer
        cells: list[str] = []
        for op in PASSES:
            point = ops.get(op)
            cells.append(f"{point.seconds / MICRO:,.0f}" if point else "-")
            if op in ("forward", "backward"):
                peak = peaks.get((dtype, layers[0].processes))
                known = point is not None and peak is not None and point.flops
                cells.append(f"{point.flops / point.seconds / peak.flops:.0%}" if known else "-")  # pyright: ignore
        table.add_row(layer, str(width), f"{sequences} x {tokens}", *cells)
    console.print(table, "")


def _print_rates(console: Console, layers: Sequence[LayerPoint]) -> None:
    rates = fit_kernels(layers)
    table = _table(f"fit, {layers[0].processes} at once", "dtype", "launch us", "GFLOP/s", "GB/s", left=2)
    for (family, dtype), rate in sorted(rates.items()):
        numbers = (f"{each / GIGA:,.1f}" if each else "-" for each in (rate.flops, rate.bytes))
        table.add_row(family, dtype, f"{rate.launch / MICRO:,.1f}" if rate.launch else "-", *numbers)
    console.print("", table, "")
    errors = _table("errors of that fit", "points", "median", "worst", left=1)
    for (layer, op), found in sorted(errors_by_layer(layers, rates).items()):
        errors.add_row(f"{layer}, {op.replace('_', ' ')}", *_errors(found))
    errors.add_row()
    errors.add_row("all", *_errors(errors_of(layers, rates)))
    console.print(errors, "")


def _errors(errors: Errors) -> tuple[str, str, str]:
    return str(errors.points), f"{errors.median:.0%}", f"{errors.worst:.0%}"


def _table(*heads: str, left: int) -> Table:
    """A table whose first columns are words and whose others are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold", show_edge=False)
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < left else "right", no_wrap=True)
    return table
