"""Tables of everything that a bench has measured and fitted: a row for each size or layer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from shardlab.cli.console import table_of
from shardlab.measure.kernel_fit import errors_by_layer, errors_of, fit_kernels
from shardlab.measure.points import CollectivePoint, LayerPoint, OverlapPoint, PeakPoint
from shardlab.measure.regression import FitErrors
from shardlab.measure.sizes import size_text

GIGA = 1e9
MICRO = 1e-6

PASSES = ("forward", "backward", "backward_input", "backward_weight", "update")


def print_sizes(console: Console, measured: Sequence[CollectivePoint]) -> None:
    """Print every collective at every size, called again and again."""
    table = table_of("collective", "ranks", "size", "time us", "alg GB/s", "bus GB/s", "wrong", gap=1)
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
            f"[bold red]{point.wrong}[/]" if point.wrong else "0",
        )
    console.print(table, "")


def print_overlap(console: Console, points: Sequence[OverlapPoint]) -> None:
    """Print what every collective adds to a step that computes, and how much of it compute hides."""
    if not points:
        return
    table = table_of("in a step", "ranks", "size", "compute us", "it adds us", "beside us", "hidden", gap=1)
    for point in points:
        times = (f"{each / MICRO:,.0f}" for each in (point.compute, point.communication, point.together))
        size = size_text(point.bytes) if point.bytes else "-"
        table.add_row(point.kind, str(point.ranks), size, *times, hidden_text(point.overlap))
    console.print(table)
    console.print(
        "[dim]it adds: where it is waited for between computations; beside: computed between its start and the wait\n"
        "hidden: of the shorter of the two; 0% is one after the other, and none is slower than that[/]\n"
    )


def hidden_text(share: float) -> str:
    """The share of what could be hidden that was; timings that scatter give less than none, or more than all."""
    return "none" if share < 0 else f"{min(share, 1.0):.0%}"


def print_layers(console: Console, layers: Sequence[LayerPoint], peaks: dict[tuple[str, int], PeakPoint]) -> None:
    """Print every layer that has a forward pass, at every size."""
    console.print(
        f"[bold]{layers[0].processes} at once[/], in microseconds, and as a share of the peak; a backward pass also in "
        "halves, for the input and for the weight"
    )
    heads = ("forward", "peak", "backward", "peak", "input", "weight", "update")
    table = table_of("layer", "width", "batch", *heads, gap=1)
    rows: dict[tuple[str, int, int, int, str], dict[str, LayerPoint]] = {}
    for point in layers:
        key = (point.layer, point.width, point.rows, point.tokens, point.dtype)
        rows.setdefault(key, {}).setdefault("forward" if point.op == "loss" else point.op, point)
    sizes = len({key[1:] for key in rows})
    before = ""
    for (layer, width, sequences, tokens, dtype), ops in sorted(rows.items(), key=lambda row: row[0]):
        if not ops.keys() & set(PASSES):  # drawing a batch and adding a gradient are in the fit alone
            continue
        if before and layer != before and sizes > 1:
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


def print_rates(console: Console, layers: Sequence[LayerPoint]) -> None:
    """Print what each kind of kernel was found to reach, and how far that is from each layer's timings."""
    rates = fit_kernels(layers)
    table = table_of(f"fit, {layers[0].processes} at once", "dtype", "launch us", "GFLOP/s", "GB/s", words=2, gap=1)
    for (family, dtype), rate in sorted(rates.items()):
        numbers = (f"{each / GIGA:,.1f}" if each else "-" for each in (rate.flops, rate.bytes))
        table.add_row(family, dtype, f"{rate.launch / MICRO:,.1f}" if rate.launch else "-", *numbers)
    console.print("", table, "")
    errors = table_of("errors of that fit", "points", "median", "worst", gap=1)
    for (layer, op), found in sorted(errors_by_layer(layers, rates).items()):
        errors.add_row(f"{layer}, {op.replace('_', ' ')}", *_errors(found))
    errors.add_row()
    errors.add_row("all", *_errors(errors_of(layers, rates)))
    console.print(errors, "")


def _errors(errors: FitErrors) -> tuple[str, str, str]:
    return str(errors.points), f"{errors.median:.0%}", f"{errors.worst:.0%}"
