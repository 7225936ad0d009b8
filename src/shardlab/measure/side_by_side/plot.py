"""Drawing of a comparison: for each strategy our step above PyTorch's, as shares of PyTorch's median."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from matplotlib.figure import Figure

from shardlab.draw.canvas import style
from shardlab.measure.plot import save_figure
from shardlab.measure.side_by_side.pairs import StrategyPair
from shardlab.measure.side_by_side.results import Compared, Parts

COLORS = ("#54aeff", "#d4a72c", "#d0d7de")
"""Colours of compute, overhead and waiting."""


def plot_strategies(found: Mapping[str, list[tuple[StrategyPair, Compared]]], paths: list[Path]) -> None:
    """A panel for each size, by its title."""
    with style():
        rows = max(map(len, found.values()))
        figure = Figure(figsize=(4.6 * len(found), 0.7 + 0.55 * rows), layout="constrained")
        for axis, (title, pairs) in zip(figure.subplots(1, len(found), squeeze=False)[0], found.items(), strict=True):
            _panel(axis, title, pairs)
        figure.supxlabel("time of a step over PyTorch's: ours above, PyTorch's below", fontsize=8)
        for path in paths:
            save_figure(figure, path)


def _panel(axis: Any, title: str, pairs: list[tuple[StrategyPair, Compared]]) -> None:
    for row, (_, compared) in enumerate(pairs):
        unit = median(compared.theirs.seconds)
        for place, side in ((row - 0.2, compared.ours), (row + 0.2, compared.theirs)):
            at = 0.0
            for name, color, part in zip(Parts._fields, COLORS, side.parts(compared.floor), strict=True):
                label = name if row == 0 and side is compared.ours else None
                axis.barh(place, max(0.0, part) / unit, 0.36, at, color=color, label=label)
                at += max(0.0, part) / unit
        low, middle, high = compared.ratio
        axis.errorbar(middle, row - 0.2, xerr=[[middle - low], [high - middle]], fmt="o", ms=3, color="#24292f")
    axis.axvline(1.0, lw=0.8, color="0.5")
    names = [f"{pair.name}\n{pair.theirs}" for pair, _ in pairs]
    axis.set_yticks(range(len(pairs)), names)
    axis.invert_yaxis()
    axis.set_title(title, pad=16)
    axis.legend(frameon=False, fontsize=6, ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0)
