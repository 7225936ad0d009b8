"""Pictures of values: a network in which the parts held by a rank are filled.

`value_svg` draws one value, `store_svg` all values of one store of a rank, and `network_svg` any values. Between the
layers are columns with a row for each microbatch: activations on the left, their gradients on the right. The box of a
layer shows its weights, its gradient (with a row for each microbatch in the sum) and its optimizer state. Each of these
is divided from left to right into slices.
"""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Iterable

from shardlab.draw.canvas import FAINT, Box, Page, fill, style
from shardlab.language import Kind, Rank, Spec, Store, Value
from shardlab.language.rules.kinds import bits

COLORS = {
    Kind.WEIGHT: "#0072b2",
    Kind.GRAD_WEIGHT: "#d55e00",
    Kind.OPT_STATE: "#56b4e9",
    Kind.ACTIVATION: "#009e73",
    Kind.GRAD_ACTIVATION: "#e69f00",
}
"""Palette of Okabe and Ito (2008), whose colours can be told apart with every kind of colour vision."""

BANDS = {Kind.WEIGHT: (0.0, 0.3), Kind.GRAD_WEIGHT: (0.34, 0.78), Kind.OPT_STATE: (0.82, 1.0)}
"""Start and end of each kind's part in a layer's box, as fractions of the box's height from the top."""

HALVES = {Kind.ACTIVATION: (0.0, 0.48), Kind.GRAD_ACTIVATION: (0.52, 1.0)}
"""Start and end of each kind's part in a column of activations, as fractions of the width from the left."""

EMPTY = "#f3f5f7"

MARGIN, LEFT, TOP, HEIGHT = 0.2, 0.5, 1.02, 1.1
"""Margin of the page, left and top edge of the network, and its height, in inches."""

NAMES_WIDTH = 1.0
"""Width to the right of the network for the names of the parts of a layer's box, in inches."""

LETTER = 0.092
"""Width of a letter of the title, in inches."""

NUMBERED_ROWS = 16
"""Largest number of microbatches for which rows are ruled and numbered."""


def value_svg(value: Value) -> str:
    """Draw one value in its network, as an SVG document."""
    state = "" if value.alive else ", freed"
    title = f"{value.spec} on rank {value.rank.index}{state}"
    return network_svg(
        [value.spec], *_network_size(value), title, f"{value.elements:,} elements, {value.bytes:,} bytes"
    )


def store_svg(store: Store) -> str | None:
    """Draw all values of a store in their network, as an SVG document (None: the store is empty)."""
    values = list({value.number: value for value in store.values()}.values())
    if not values:
        return None
    title = f"rank.{store.kind.value} on rank {values[0].rank.index}"
    note = f"{len(values)} value{'s' * (len(values) > 1)}, {sum(value.elements for value in values):,} elements"
    return network_svg([value.spec for value in values], *_network_size(values[0]), title, note)


def network_svg(specs: Iterable[Spec], layers: int, microbatches: int, title: str = "", note: str = "") -> str:
    """Draw any values of one network by their specs, as an SVG document.

    >>> half = Spec(form_of(Kind.WEIGHT, 1, 0, Space(4), Holds(0b01, 2)))
    >>> page = network_svg([half], layers=3, microbatches=4, title="half of layer 1")
    """
    specs = list(specs)
    with style():
        net = _Network(layers, microbatches, title)
        net.page.ink.text(MARGIN, 0.22, title, size=11, weight="bold", va="center")
        net.page.ink.text(MARGIN, 0.44, note, size=8.5, color=FAINT, va="center")
        for layer in range(layers):
            for kind in BANDS:
                net.empty(kind, layer)
        for layer in range(layers + 1):
            for kind in HALVES:
                net.empty(kind, layer)
        for spec in specs:
            net.hold(spec)
        net.name_parts({spec.kind for spec in specs})
        return net.page.svg()


class _Network:
    """Page with a box for each kind of value at each layer of a network."""

    def __init__(self, layers: int, microbatches: int, title: str) -> None:
        self.layers = layers
        self.microbatches = microbatches
        self.pitch = max(0.3, min(1.25, 12 / layers))
        self.column = 0.28 * self.pitch
        width = max(LEFT + layers * self.pitch + self.column + NAMES_WIDTH, 2 * MARGIN + len(title) * LETTER, 5.2)
        self.page = Page(width, TOP + HEIGHT + 0.42)

    def area(self, kind: Kind, layer: int) -> Box:
        """Return the box of one kind of value at one layer, in inches."""
        left = LEFT + layer * self.pitch
        if kind in HALVES:
            start, stop = HALVES[kind]
            return left + start * self.column, TOP, left + stop * self.column, TOP + HEIGHT
        start, stop = BANDS[kind]
        gap = 0.14 * self.pitch
        return left + self.column + gap, TOP + start * HEIGHT, left + self.pitch - gap, TOP + stop * HEIGHT

    def empty(self, kind: Kind, layer: int) -> None:
        """Draw the empty box of one kind of value at one layer."""
        ruled = (kind in HALVES or kind is Kind.GRAD_WEIGHT) and self.microbatches <= NUMBERED_ROWS
        rows = self.microbatches if ruled else 1
        cells = [_cell(self.area(kind, layer), 0, 1, row, rows) for row in range(rows)]
        fill(self.page.ink, cells, EMPTY, edge="#d0d7de", width=0.5)

    def hold(self, spec: Spec) -> None:
        """Fill the slices and microbatches that a value holds."""
        area = self.area(spec.kind, spec.layer)
        columns, rows = ([0], 1), ([0], 1)
        if spec.kind in HALVES:
            rows = (list(bits(spec.cells)), self.microbatches * spec.form.space.sequence)
        else:
            columns = (list(bits(spec.holds.mask)), spec.holds.of)
        if spec.kind is Kind.GRAD_WEIGHT:
            rows = (list(bits(spec.microbatches)), self.microbatches)
        cells = [_cell(area, column, columns[1], row, rows[1]) for column in columns[0] for row in rows[0]]
        width = min(0.6, 4 / max(columns[1], rows[1]))
        fill(self.page.ink, cells, COLORS[spec.kind], edge="white", width=width)

    def name_parts(self, kinds: set[Kind]) -> None:
        """Label the layers, the microbatches and the parts of a layer's box, and draw the legend.

        Args:
            kinds: kinds of the held values.
        """
        label_y = TOP + HEIGHT + 0.14
        interval = 1 if self.pitch > 0.4 else 4
        for layer in range(0, self.layers, interval):
            left, _, right, _ = self.area(Kind.WEIGHT, layer)
            text = f"layer {layer}" if self.pitch > 0.8 else str(layer)
            self.page.ink.text((left + right) / 2, label_y, text, size=7.5, color=FAINT, ha="center", va="center")
        if self.microbatches <= NUMBERED_ROWS:
            for row in range(self.microbatches):
                place = (LEFT - 0.06, TOP + (row + 0.5) * HEIGHT / self.microbatches)
                self.page.ink.text(*place, str(row), size=6.5, color=FAINT, ha="right", va="center_baseline")
            middle = TOP + HEIGHT / 2
            text = "microbatch"
            self.page.ink.text(MARGIN, middle, text, size=6.5, color=FAINT, rotation=90, ha="center", va="center")
        end = LEFT + self.layers * self.pitch + self.column + 0.08
        for kind, (start, stop) in BANDS.items():
            middle = TOP + (start + stop) / 2 * HEIGHT
            self.page.ink.text(end, middle, kind.value, size=6.5, color=FAINT, va="center_baseline")
        columns = " | ".join(kind.value for kind in HALVES)
        self.page.ink.text(LEFT, TOP - 0.09, f"{columns}, of each microbatch", size=6.5, color=FAINT, va="center")
        x = MARGIN
        for kind, color in COLORS.items():
            if kind in kinds:
                x = self._key(x, kind.value, color)
        self._key(x, "not held", EMPTY)

    def _key(self, left: float, text: str, color: str) -> float:
        """Draw an entry of the legend, and return the left edge of the next one."""
        edge = "#d0d7de" if color == EMPTY else "none"
        fill(self.page.ink, [(left, 0.62, left + 0.14, 0.76)], color, edge=edge, width=0.5)
        self.page.ink.text(left + 0.2, 0.69, text, size=8, color=FAINT, va="center_baseline")
        return left + 0.42 + len(text) * 0.065


def _network_size(value: Value) -> tuple[int, int]:
    """Return the number of layers and of microbatches in the world of a value."""
    assert isinstance(value.rank, Rank)
    return len(value.rank.layers), len(value.rank.microbatches)


def _cell(area: Box, column: int, columns: int, row: int, rows: int) -> Box:
    left, top, right, bottom = area
    width, height = (right - left) / columns, (bottom - top) / rows
    return left + column * width, top + row * height, left + (column + 1) * width, top + (row + 1) * height
