"""The colours that ops name (see `shardlab.program.ops`), as they are drawn.

Layers take the viridis map, which keeps its order for every kind of colour vision.
"""

from __future__ import annotations

from functools import cache

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from shardlab.program.ops import Color

LOSS = "#9a6700"
PEAK = "#d55e00"
OTHER = "#8c959f"
"""Compute that is not a pass: sums of gradients, norms."""

Family = tuple[str, str]
"""The darkest and the lightest of a pass's shades."""

FORWARD: Family = ("#2a62b8", "#a9cbf5")
BACKWARD: Family = ("#e0761b", "#fad0a0")
BACKWARD_INPUT: Family = ("#10908f", "#98dcd6")
BACKWARD_WEIGHT: Family = ("#5d9c1f", "#c5e39a")

SHADES: dict[Color, Family] = {
    "blue": FORWARD,
    "light blue": FORWARD,
    "orange": BACKWARD,
    "teal": BACKWARD_INPUT,
    "green": BACKWARD_WEIGHT,
}
"""The passes' colours."""

COLORS: dict[Color, str] = {
    "black": "#24292f",
    "brown": LOSS,
    "grey": OTHER,
    "light grey": OTHER,
    "yellow": "#f2c811",
    "magenta": "#c763a5",
    "red": "#b3243f",
    "violet": "#8a63c7",
    "lilac": "#c3b1e1",
    "pink": "#ecc3de",
    "cream": "#f8e79b",
    "rose": "#dc98a3",
    "slate": "#57606a",
    "light slate": "#a4adb6",
}
"""The colours of all other ops."""


@cache
def shade(family: Family, place: float) -> str:
    """A pass's shade, from its darkest at 0 to its lightest at 1."""
    return mixed(*family, place)


@cache
def layer_color(layer: int, layers: int) -> str:
    """Dark for the first layer, light for the last."""
    place = 0.12 + 0.76 * (layer / (layers - 1) if layers > 1 else 0.35)
    return to_hex(mpl.colormaps["viridis"](place))


def mixed(color: str, other: str, share: float) -> str:
    """A colour with a share of another in it."""
    red, green, blue = (a * (1 - share) + b * share for a, b in zip(to_rgb(color), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


@cache
def pale(color: str) -> str:
    return mixed(color, "#ffffff", 0.74)


@cache
def ink_on(color: str) -> str:
    """Black or white, whichever reads better on a colour (relative luminance, WCAG 2)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.207 else "#1b1f24"
