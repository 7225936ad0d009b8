"""What the looks of a timeline mean, in rows above it."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from shardlab.draw.canvas import FAINT, Box, Page, fill
from shardlab.draw.lanes import STRIPE
from shardlab.draw.palette import COMMUNICATION_LOOKS, LOSS, UPDATE, ink_on, layer_color, pale
from shardlab.program import OpKind
from shardlab.simulate import Timeline

SIZE = 8.0
ROW = 0.24
SWATCH = (0.26, 0.15)
NAMED_LAYERS = 12
"""Up to so many layers get a numbered swatch each."""


class Item(NamedTuple):
    """A word, and what draws its swatch into a box."""

    text: str
    paint: Callable[[Page, Box], None]
    width: float = SWATCH[0]


def legend_items(timeline: Timeline, numbered: bool) -> list[Item]:
    """What occurs in this timeline, as it is usually met; `numbered` if its boxes name their microbatches."""
    kinds = {event.kind for events in timeline.events for event in events}
    color = layer_color(timeline.program.layers // 2, timeline.program.layers)
    compute = {
        OpKind.FORWARD: Item("forward", _plain(color)),
        OpKind.LOSS: Item("loss", _loss),
        OpKind.RECOMPUTE: Item("recompute", _plain(color, "////")),
        OpKind.BACKWARD: Item("backward", _backward(color)),
        OpKind.ATTEND: Item("attention between slices", _plain(color, "....")),
        OpKind.UPDATE: Item("update", _plain(UPDATE)),
    }
    items = [item for kind, item in compute.items() if kind in kinds]
    for kind, look in COMMUNICATION_LOOKS.items():
        if kind in kinds:
            items.append(Item(look.word, _plain(look.color, letters=look.letters)))
    items.append(_layers(timeline.program.layers))
    return [*items, Item("microbatches", _number)] if numbered else items


def flow(items: list[Item], width: float) -> list[list[Item]]:
    """The items in rows no wider than the page."""
    rows: list[list[Item]] = [[]]
    used = 0.0
    for item in items:
        needed = _width(item)
        if used + needed > width and rows[-1]:
            rows.append([])
            used = 0.0
        rows[-1].append(item)
        used += needed
    return rows


def draw_legend(page: Page, rows: list[list[Item]], left: float, top: float) -> None:
    """Lay out the rows from a place on the page."""
    for number, row in enumerate(rows):
        x, middle = left, top + (number + 0.5) * ROW
        for item in row:
            box = (x, middle - SWATCH[1] / 2, x + item.width, middle + SWATCH[1] / 2)
            item.paint(page, box)
            page.ink.text(box[2] + 0.06, middle, item.text, size=SIZE, color=FAINT, va="center_baseline")
            x += _width(item)


def _width(item: Item) -> float:
    return item.width + 0.06 + len(item.text) * 0.57 * SIZE / 72 + 0.18


def _plain(color: str, hatch: str = "", letters: str = "") -> Callable[[Page, Box], None]:
    def paint(page: Page, box: Box) -> None:
        fill(page.ink, [box], color, edge="white", width=0.5, hatch=hatch)
        center = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
        page.ink.text(*center, letters, size=6.5, color=ink_on(color), ha="center", va="center_baseline")

    return paint


def _backward(color: str) -> Callable[[Page, Box], None]:
    def paint(page: Page, box: Box) -> None:
        fill(page.ink, [box], pale(color))
        fill(page.ink, [(box[0], box[3] - STRIPE * (box[3] - box[1]), box[2], box[3])], color)

    return paint


def _loss(page: Page, box: Box) -> None:
    middle = (box[0] + box[2]) / 2
    fill(page.ink, [(middle - 0.01, box[1], middle + 0.01, box[3])], LOSS)


def _number(page: Page, box: Box) -> None:
    fill(page.ink, [box], "white", edge=FAINT, width=0.6)
    center = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    page.ink.text(*center, "0-3", size=6.5, color=FAINT, ha="center", va="center_baseline")


def _layers(layers: int) -> Item:
    """Numbered swatches for a few layers, a ramp for many."""
    named = layers <= NAMED_LAYERS
    each = 0.19 if named else 1.6 / layers

    def paint(page: Page, box: Box) -> None:
        left, top, _, bottom = box
        for layer in range(layers):
            color = layer_color(layer, layers)
            fill(page.ink, [(left + layer * each, top, left + (layer + 1) * each, bottom)], color)
            if named:
                place = (left + (layer + 0.5) * each, (top + bottom) / 2)
                page.ink.text(*place, str(layer), size=6.5, color=ink_on(color), ha="center", va="center_baseline")

    return Item("layer" if named else f"layers 0-{layers - 1}", paint, layers * each)
