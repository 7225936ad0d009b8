"""The colours that ops name (see `shardlab.program.ops`), as they are drawn.

Layers take the viridis map, which keeps its order for every kind of colour vision.
"""

from __future__ import annotations

from functools import cache

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from shardlab.program.colors import HUES
from shardlab.program.ops import Color

PEAK = "#d55e00"

Family = tuple[str, str]
"""The darkest and the lightest of a pass's shades."""

SHADES: dict[Color, Family] = {name: (hue.drawn, hue.lightest) for name, hue in HUES.items() if hue.lightest}
"""The passes' colours."""

FORWARD, BACKWARD = SHADES["blue"], SHADES["orange"]
BACKWARD_INPUT, BACKWARD_WEIGHT = SHADES["teal"], SHADES["green"]

COLORS: dict[Color, str] = {name: hue.drawn for name, hue in HUES.items() if not hue.lightest}
"""The colours of all other ops."""

LOSS, OTHER = COLORS["brown"], COLORS["grey"]
"""The loss, and compute that is no pass: sums of gradients, norms."""


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
