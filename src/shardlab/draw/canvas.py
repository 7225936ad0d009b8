"""A figure measured in inches from its top left corner, and its SVG: the same text on every machine."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from io import StringIO
from typing import Any
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

_LONG = re.compile(r"(\.\d\d)\d+")
"""Digits beyond a hundredth of a point, which are most of a large picture's bytes."""

_CORNERS = re.compile(r"M (\S+) (\S+) \nL (\S+) \2 \nL \3 (\S+) \nL \1 \4 \nz")
"""An upright box by its corners."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

INK = "#24292f"
FAINT = "#6e7781"
IDLE = "#eff1f3"
EM = 0.62
"""Width of a digit over the font's size."""

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "shardlab",  # ids do not change from run to run
    "svg.fonttype": "none",  # text stays text: small, searchable, and read aloud
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 8.0,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#d0d7de",
    "axes.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "hatch.linewidth": 0.8,
}


@contextmanager
def style() -> Generator[None, None, None]:
    """Draw and save within this, so that a user's matplotlib settings neither change the picture nor are changed."""
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


class Page:
    """A white page; `ink` covers it all, in inches with y downwards."""

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.figure = Figure(figsize=(width, height), facecolor="white")
        self.ink = self.panel((0, 0, width, height))
        self.ink.set_axis_off()
        self.ink.set_xlim(0, width)
        self.ink.set_ylim(height, 0)
        self._texts: dict[tuple[str, str], list[str]] = defaultdict(list)

    def panel(self, box: Box) -> Axes:
        """Axes that fill a box of the page."""
        left, top, right, bottom = box
        place = (left / self.width, 1 - bottom / self.height, (right - left) / self.width, (bottom - top) / self.height)
        return self.figure.add_axes(place)

    def write(self, axes: Axes, place: tuple[float, float], text: str, size: float, color: str) -> None:
        """Centre a text on a place of some axes, whose limits are set: small, since a picture has thousands.

        Args:
            place: in the axes' own units.
            size: in points.
        """
        x, y = axes.transData.transform(place) * 72 / self.figure.dpi
        baseline = 72 * self.height - y + 0.36 * size
        self._texts[f"{size:.1f}", color].append(f'<text x="{x:.1f}" y="{baseline:.1f}">{escape(text)}</text>')

    def svg(self) -> str:
        """The page as an SVG document without a date."""
        text = StringIO()
        FigureCanvasSVG(self.figure).print_svg(text, metadata={"Date": None, "Creator": "shardlab"})
        drawn = re.sub(r' d="[^"]*"', lambda path: _shorter(path[0]), text.getvalue())
        written = [
            f"<g style=\"font: {size}px 'DejaVu Sans', sans-serif; text-anchor: middle; fill: {color}\">"
            + "\n".join(texts)
            + "</g>\n"
            for (size, color), texts in self._texts.items()
        ]
        return drawn.replace("</svg>", "".join(written) + "</svg>")


def _shorter(path: str) -> str:
    """A path in fewer characters: no digit that cannot be seen, and boxes by their sides."""
    return _CORNERS.sub(r"M\1 \2H\3V\4H\1z", _LONG.sub(r"\1", path))


def fill(
    axes: Axes, boxes: Iterable[Box], color: str, *, edge: str = "none", width: float = 0, hatch: str = ""
) -> None:
    """Many boxes of one look as one path, so that a picture of 30 000 ops stays small."""
    vertices: list[tuple[float, float]] = []
    for left, top, right, bottom in boxes:
        vertices += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    if not vertices:
        return
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(vertices) // 5)
    patch = PathPatch(Path(vertices, codes), facecolor=color, edgecolor=edge, linewidth=width, hatch=hatch or None)
    patch.set_snap(False)
    axes.add_artist(patch)


def fitting(text: str, width: float) -> float:
    """The largest font size at which text fits into a width, both in points."""
    return (width - 1.5) / (len(text) * EM)
