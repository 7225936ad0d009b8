"""What each op looks like. Layers take the viridis map, which keeps its order for every kind of colour vision;
communication takes what is left of the Okabe-Ito palette, and a shape or letters besides."""

from __future__ import annotations

from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.colors import to_hex, to_rgb

from shardlab.program import OpKind

UPDATE = "#24292f"
LOSS = "#9a6700"
PEAK = "#d55e00"


@dataclass(frozen=True)
class Look:
    """How a communication is drawn: its colour, the letters on it and the word for it in the legend."""

    color: str
    letters: str
    word: str


COMMUNICATION_LOOKS = {
    OpKind.ALL_GATHER: Look("#e69f00", "AG", "all-gather"),
    OpKind.REDUCE_SCATTER: Look("#cc79a7", "RS", "reduce-scatter"),
    OpKind.ALL_REDUCE: Look("#d55e00", "AR", "all-reduce"),
    OpKind.ALL_TO_ALL: Look("#56b4e9", "AA", "all-to-all"),
    OpKind.BROADCAST: Look("#f0e442", "BC", "broadcast"),
    OpKind.SCATTER: Look("#e6bcd3", "SC", "scatter"),
    OpKind.GATHER: Look("#f3cf80", "GA", "gather"),
    OpKind.REDUCE: Look("#eaae80", "RE", "reduce"),
    OpKind.BARRIER: Look("#8c959f", "‖", "barrier"),
    OpKind.SEND: Look("#57606a", "→", "send"),
    OpKind.RECV: Look("#a4adb6", "←", "receive"),
}


def layer_color(layer: int, layers: int) -> str:
    """Dark for the first layer, light for the last."""
    place = 0.12 + 0.76 * (layer / (layers - 1) if layers > 1 else 0.35)
    return to_hex(mpl.colormaps["viridis"](place))


def mixed(color: str, other: str, share: float) -> str:
    """A colour with a share of another in it."""
    red, green, blue = (a * (1 - share) + b * share for a, b in zip(to_rgb(color), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


def pale(color: str) -> str:
    return mixed(color, "#ffffff", 0.74)


def ink_on(color: str) -> str:
    """Black or white, whichever reads better on a colour (relative luminance, WCAG 2)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.179 else "#1b1f24"
