"""Page, colours and box styles of all pictures.

A `Page` is a matplotlib figure whose coordinates are inches from its top left corner. Its SVG is the same text on every
machine, so tests compare whole files. `Looks` chooses the style (`Paint`) of each event of a timeline: the colour and
hatch of its kind (see `shardlab.language.ops.HUES`), in a lightness that shows its model chunk or layer. `chunks_of`
and `model_layer` translate a program's layers into the model chunks of a pipeline and the layers of the model.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, partial
from io import StringIO
from itertools import pairwise
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from shardlab.language import OpKind, Sizes
from shardlab.language.ops import HUES, Color, ColorBy
from shardlab.simulate.timeline import Event, Timeline

_LONG = re.compile(r"(\.\d\d)\d+")
"""Digits beyond a hundredth of a point. Removing them more than halves the bytes of a large picture."""

_CORNERS = re.compile(r"M (\S+) (\S+) \nL (\S+) \2 \nL \3 (\S+) \nL \1 \4 \nz")
"""SVG path of an upright box, as a list of its corners."""

Box = tuple[float, float, float, float]
"""Left, top, right, bottom."""

INK = "#24292f"

FAINT = "#6e7781"

IDLE = "#eff1f3"

GROUND = "#ffffff"
"""Colour of the page, and of the gaps between boxes."""

DARK = {
    FAINT: "#9198a1",
    IDLE: "#21262d",
    "#f3f5f7": "#21262d",
    "#c6ccd2": "#484f58",
    "#d0d7de": "#3d444d",
    "#d8dee4": "#3d444d",
    "#e4e8ec": "#30363d",
}
"""Greys of pictures, each with its colour on a dark ground. The viewer uses the same colours."""

DARK_GROUND, DARK_INK, DARK_BOX = "#0d1117", "#e6edf3", "#656c76"
"""The page, text on it, and boxes in the colour of the text, on a dark ground."""

DIGIT_WIDTH = 0.62
"""Width of a digit as a fraction of the font size."""

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

PEAK = "#d55e00"

Family = tuple[str, str]
"""Darkest and lightest shade of a pass (forward, backward, ...)."""

SHADES: dict[Color, Family] = {name: (hue.fill, hue.lightest) for name, hue in HUES.items() if hue.lightest}
"""Shades of the passes."""

FORWARD, BACKWARD = SHADES["blue"], SHADES["orange"]

BACKWARD_INPUT, BACKWARD_WEIGHT = SHADES["teal"], SHADES["green"]

COLORS: dict[Color, str] = {name: hue.fill for name, hue in HUES.items() if not hue.lightest}
"""Colours of all other ops."""

LOSS, OTHER = COLORS["brown"], COLORS["grey"]
"""Colours of the loss, and of compute outside of passes, such as sums of gradients and norms."""

Chunks = list[dict[int, int]]
"""One dictionary for each row of a timeline. It maps each layer of the row to its model chunk. A rank of a pipeline may
have several stages, which Megatron-LM calls model chunks; they are numbered from 0 on each rank."""


class Page:
    """Page on which panels are drawn. It is white, or dark where the reader prefers a dark colour scheme.

    Attributes:
        width, height: size of the page in inches.
        figure: figure of matplotlib.
        ink: axes that cover the page. Their unit is an inch, and y points down.
    """

    def __init__(self, width: float, height: float) -> None:
        self.width = width
        self.height = height
        self.figure = Figure(figsize=(width, height), facecolor=GROUND)
        self.ink = self.panel((0, 0, width, height))
        self.ink.set_axis_off()
        self.ink.set_xlim(0, width)
        self.ink.set_ylim(height, 0)
        self._texts: dict[tuple[str, str], list[str]] = defaultdict(list)

    def panel(self, box: Box) -> Axes:
        """Return new axes that fill a box of the page."""
        left, top, right, bottom = box
        place = (left / self.width, 1 - bottom / self.height, (right - left) / self.width, (bottom - top) / self.height)
        return self.figure.add_axes(place)

    def write(self, axes: Axes, place: tuple[float, float], text: str, size: float, color: str) -> None:
        """Write a text centred at a position of some axes, whose limits must be set.

        The text is written in few bytes of SVG, because a picture has thousands of such texts.

        Args:
            place: centre of the text, in the units of the axes.
            size: font size in points.
        """
        x, y = axes.transData.transform(place) * 72 / self.figure.dpi
        baseline = 72 * self.height - y + 0.36 * size
        self._texts[f"{size:.1f}", color].append(f'<text x="{x:.1f}" y="{baseline:.1f}">{escape(text)}</text>')

    def svg(self) -> str:
        """Return the page as an SVG document without a date."""
        text = StringIO()
        FigureCanvasSVG(self.figure).print_svg(text, metadata={"Date": None, "Creator": "shardlab"})
        shapes = re.sub(r' d="[^"]*"', lambda path: _shorter(path[0]), text.getvalue())
        text_groups = [
            f"<g style=\"font: {size}px 'DejaVu Sans', sans-serif; text-anchor: middle; fill: {color}\">"
            + "\n".join(texts)
            + "</g>\n"
            for (size, color), texts in self._texts.items()
        ]
        picture = shapes.replace("<svg ", '<svg class="shardlab" ', 1).replace("</style>", f"{dark_rules()}</style>", 1)
        return picture.replace("</svg>", "".join(text_groups) + "</svg>")


@cache
def dark_rules() -> str:
    """Return the CSS that exchanges the greys of a picture where the reader prefers a dark colour scheme.

    A picture in an HTML page shares its style sheet with the page, so all selectors are limited to pictures. White text
    stays white, since it lies on coloured boxes.
    """
    exchanges = [
        *(("", place, color, dark) for color, dark in DARK.items() for place in ("fill", "stroke")),
        *((element, place, GROUND, DARK_GROUND) for element in ("path", "use") for place in ("fill", "stroke")),
        *((element, "fill", INK, DARK_INK) for element in ("text", "g")),
        ("path", "fill", INK, DARK_BOX),
    ]
    rules = [
        f'.shardlab {element}[style*="{place}: {color}"] {{{place}: {dark} !important}}'
        for element, place, color, dark in exchanges
    ]
    return "@media (prefers-color-scheme: dark) {" + "\n".join(rules) + "}"


@contextmanager
def style() -> Generator[None, None, None]:
    """Set Shardlab's matplotlib style in this context.

    The user's matplotlib settings do not change the picture, and are restored afterwards.
    """
    with mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        yield


def fill(
    axes: Axes, boxes: Iterable[Box], color: str, *, edge: str = "none", width: float = 0, hatch: str = ""
) -> None:
    """Draw many boxes of the same style as one path, so that a picture of 30 000 ops stays small."""
    vertices: list[tuple[float, float]] = []
    for left, top, right, bottom in boxes:
        vertices += [(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]
    if not vertices:
        return
    codes = [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY] * (len(vertices) // 5)
    patch = PathPatch(Path(vertices, codes), facecolor=color, edgecolor=edge, linewidth=width, hatch=hatch or None)
    patch.set_snap(False)
    axes.add_artist(patch)


def fit_size(text: str, width: float) -> float:
    """Return the largest font size at which a text fits into a width, both in points."""
    return (width - 1.5) / (len(text) * DIGIT_WIDTH)


@cache
def shade(family: Family, place: float) -> str:
    """Interpolate between the darkest (0) and the lightest (1) shade of a pass."""
    return mixed(*family, place)


@cache
def layer_color(layer: int, layers: int) -> str:
    """Return the colour of a layer, from dark for the first to light for the last.

    The colours are those of viridis, whose order is visible with every kind of colour vision.
    """
    place = 0.12 + 0.76 * (layer / (layers - 1) if layers > 1 else 0.35)
    return to_hex(mpl.colormaps["viridis"](place))


def mixed(color: str, other: str, share: float) -> str:
    """Mix a colour with another one, whose share is `share`."""
    red, green, blue = (a * (1 - share) + b * share for a, b in zip(to_rgb(color), to_rgb(other), strict=True))
    return to_hex((red, green, blue))


@cache
def pale(color: str) -> str:
    """Return a pale version of a colour."""
    return mixed(color, "#ffffff", 0.74)


@cache
def ink_on(color: str) -> str:
    """Return black or white, whichever has more contrast to a colour (relative luminance, WCAG 2)."""
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color))
    return "#ffffff" if 0.2126 * red + 0.7152 * green + 0.0722 * blue < 0.207 else "#1b1f24"


class Paint(NamedTuple):
    """Style of boxes.

    Attributes:
        color, hatch: fill of the whole box.
        top, bottom: colours of stripes along the edges ("": no stripe).
    """

    color: str
    hatch: str = ""
    top: str = ""
    bottom: str = ""


class Looks:
    """Styles of the boxes of one timeline.

    Attributes:
        by: meaning of the colour: "pass" or "layer".
        layers: number of layers of the model.
        chunks: number of model chunks of each pipeline rank; 0 without a pipeline.
    """

    def __init__(self, timeline: Timeline, by: ColorBy) -> None:
        self.by = by
        self._sizes = timeline.program.sizes
        self._chunks = chunks_of(timeline)
        self.layers = model_layer_count(self._sizes)
        self.chunks = 1 + max((n for row in self._chunks for n in row.values()), default=0) if self._chunks else 0
        self._layer_of: Callable[[int], int] = cache(partial(model_layer, self._sizes))
        self.compute_paint = cache(self._compute_paint)

    def chunk(self, event: Event) -> int:
        """Return the model chunk of an event, or 0 without a pipeline."""
        return self._chunks[event.rank].get(event.layer, 0) if self._chunks else 0

    def paint(self, event: Event) -> Paint:
        """Return the style of an event's box."""
        row = event.kind.row
        if not row.part_of:
            return Paint(COLORS[row.color])
        if self.by == "layer" or not self.chunks:
            return self.compute_paint(event.kind, self._layer_of(event.layer))
        return self.compute_paint(event.kind, self.chunk(event))

    def _compute_paint(self, kind: OpKind, place: int) -> Paint:
        """Return the style of a pass through a layer of the model, or through a model chunk of a pipeline rank."""
        hatch, family = kind.row.hatch, SHADES[kind.row.color]
        if self.by == "pass":
            count = self.chunks or self.layers
            return Paint(shade(family, place / (count - 1) if count > 1 else 0.2), hatch)
        color = layer_color(place, self.layers)
        if family == FORWARD:
            return Paint(color, hatch)
        top = color if family != BACKWARD_WEIGHT else ""
        bottom = color if family != BACKWARD_INPUT else ""
        return Paint(pale(color), hatch, top, bottom)


def chunks_of(timeline: Timeline) -> Chunks | None:
    """Return the model chunks of a pipeline's ranks, or None if all ranks compute the same layers."""
    layers_of = [sorted({e.layer for e in events if e.kind is OpKind.FORWARD}) for events in timeline.events]
    if len({tuple(layers) for layers in layers_of if layers}) <= 1:
        return None
    runs = [_number_runs(layers) for layers in layers_of]
    max_runs = max(max(numbers, default=0) for numbers in runs) + 1
    return [
        dict(zip(layers, _split_evenly(numbers, max_runs), strict=True))
        for layers, numbers in zip(layers_of, runs, strict=True)
    ]


def model_layer_count(sizes: Sizes) -> int:
    """Return the number of layers of the model. A program may divide each of them into several."""
    if sizes.blocks:
        return len(sizes.blocks) - 1
    return len(_experts(sizes)) or sizes.layers


def model_layer(sizes: Sizes, layer: int) -> int:
    """Return the layer of the model that contains a layer of the program.

    Program layers before the model's first layer, or after its last one, count as part of that layer.
    """
    if sizes.blocks:
        number = bisect_right(sizes.blocks, layer) - 1
    elif experts := _experts(sizes):
        number = bisect_left(experts, layer)
    else:
        return layer
    return max(0, min(model_layer_count(sizes) - 1, number))


def _shorter(path: str) -> str:
    """Shorten an SVG path: remove invisible digits, and describe boxes by their sides."""
    return _CORNERS.sub(r"M\1 \2H\3V\4H\1z", _LONG.sub(r"\1", path))


def _number_runs(layers: list[int]) -> list[int]:
    """Divide layers into runs of successive layers, and return the number of each layer's run."""
    numbers = [0] * len(layers)
    for place, (one, other) in enumerate(pairwise(layers)):
        numbers[place + 1] = numbers[place] + (other != one + 1)
    return numbers


def _split_evenly(runs: list[int], max_runs: int) -> list[int]:
    """Return the model chunk of each layer of a rank.

    Each run of successive layers is a chunk if the rank has as many runs as the rank with the most. Otherwise adjacent
    stages form one run, as at the turn of a V schedule, and the rank's layers are split into `max_runs` equal chunks.

    Args:
        runs: for each layer, the number of its run.
        max_runs: largest number of runs on a rank.
    """
    if not runs or runs[-1] + 1 == max_runs:
        return runs
    return [place * max_runs // len(runs) for place in range(len(runs))]


def _experts(sizes: Sizes) -> list[int]:
    """List the program layers with the experts of a mixture. Each layer of the model has one such program layer."""
    return [number for number, layer in enumerate(sizes.signatures) if "expert" in layer.cut]
