"""Legend of a timeline: what its looks mean, in rows above it."""

# pyright: reportUnknownMemberType=false
# matplotlib's own annotations leave **kwargs untyped.

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from shardlab.draw.canvas import FAINT, IDLE, Box, Page, fill
from shardlab.draw.lanes import Panel, stripes
from shardlab.draw.looks import Looks, Paint
from shardlab.draw.palette import COLORS, FORWARD, LOSS, OTHER, ink_on
from shardlab.draw.spans import Detail
from shardlab.program import OpKind
from shardlab.program.ops import COMMUNICATION
from shardlab.timeline import Event

SIZE = 8.0
ROW = 0.24
SWATCH = (0.26, 0.15)
NAMED_LAYERS = 12
"""Layers up to which each gets a numbered swatch."""


class Item(NamedTuple):
    """A word, and what draws its swatch into a box."""

    text: str
    paint: Callable[[Page, Box], None]
    width: float = SWATCH[0]


def legend_items(panels: Sequence[Panel], numbered: bool) -> list[Item]:
    """List what occurs in these panels, in the usual order; `numbered` if boxes name their microbatches."""
    looks = panels[0].looks
    drawn = {event.kind for panel in panels for row in panel.rows for event in row.events if _is_drawn(event)}
    seen = [kind for kind in USUAL if kind in drawn]
    other = [kind for kind in seen if kind not in COMMUNICATION and COLORS.get(kind.row.color) == OTHER]
    compute = [kind for kind in seen if kind not in COMMUNICATION and kind not in other]
    items = [Item(kind.row.legend, _usual(looks, kind)) for kind in compute]
    if other:
        items.append(Item(", ".join(sorted(kind.row.legend for kind in other)), _swatch(Paint(OTHER))))
    for row in [kind.row for kind in seen if kind in COMMUNICATION]:
        items.append(Item(row.legend, _swatch(Paint(COLORS[row.color]), row.letters)))
    items += _places(looks)
    if any(panel.detail is not Detail.OPS for panel in panels):
        items.append(Item("height: share of the time", _share))
    return [*items, Item(f"microbatches{_whose(panels[0])}", _number)] if numbered else items


def _whose(panel: Panel) -> str:
    """Name the rank whose microbatches are shown, if folded ranks share out the batch: each has others."""
    mesh = panel.timeline.program.mesh
    shared = mesh.dp_replicate * mesh.dp_shard * mesh.ep > 1
    return " of a row's first rank" if shared and mesh.world > panel.timeline.program.ranks else ""


def _is_drawn(event: Event) -> bool:
    return event.end > event.start or event.kind is OpKind.LOSS


USUAL = sorted(OpKind, key=lambda kind: (kind is not OpKind.FORWARD, kind is not OpKind.LOSS))
"""Ops as they are usually met: as in their table, but the loss, which ends the forward passes, after these."""


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
    return item.width + 0.06 + len(item.text) * 0.54 * SIZE / 72 + 0.18


def _swatch(look: Paint, letters: str = "") -> Callable[[Page, Box], None]:
    def paint(page: Page, box: Box) -> None:
        fill(page.ink, [box], look.color, edge="white", width=0.5, hatch=look.hatch)
        for color, stripe in stripes(look, box):
            fill(page.ink, [stripe], color)
        _center(page, box, letters, ink_on(look.color))

    return paint


def _usual(looks: Looks, kind: OpKind) -> Callable[[Page, Box], None]:
    """A box as it is usually met: of the first chunk, or of a layer in the middle."""
    if kind is OpKind.LOSS:
        return _loss
    if not kind.row.part_of:
        return _swatch(Paint(COLORS[kind.row.color]))
    return _swatch(looks.compute_paint(kind, 0 if looks.chunks and looks.by == "pass" else looks.layers // 2))


def _center(page: Page, box: Box, text: str, color: str) -> None:
    center = ((box[0] + box[2]) / 2, (box[1] + box[3]) / 2)
    page.ink.text(*center, text, size=6.5, color=color, ha="center", va="center_baseline")


def _loss(page: Page, box: Box) -> None:
    middle = (box[0] + box[2]) / 2
    fill(page.ink, [(middle - 0.01, box[1], middle + 0.01, box[3])], LOSS)


def _number(page: Page, box: Box) -> None:
    fill(page.ink, [box], "white", edge=FAINT, width=0.6)
    _center(page, box, "0-3", FAINT)


def _share(page: Page, box: Box) -> None:
    left, top, right, bottom = box
    fill(page.ink, [box], IDLE)
    fill(page.ink, [(left, bottom - 0.6 * (bottom - top), right, bottom)], FORWARD[0])


def _places(looks: Looks) -> list[Item]:
    """Explain what a colour's lightness tells, or the layers' colours."""
    if looks.by == "pass" and looks.chunks:
        of, what = looks.chunks, "model chunk of the rank"
    else:
        of, what = looks.layers, "layer"
    if of == 1:
        return []
    return [_ramp([looks.compute_paint(OpKind.FORWARD, place).color for place in range(of)], what)]


def _ramp(colors: list[str], what: str) -> Item:
    """Numbered swatches for a few, a ramp for many."""
    named = len(colors) <= NAMED_LAYERS
    each = 0.19 if named else 1.6 / len(colors)

    def paint(page: Page, box: Box) -> None:
        left, top, _, bottom = box
        for place, color in enumerate(colors):
            each_box = (left + place * each, top, left + (place + 1) * each, bottom)
            fill(page.ink, [each_box], color)
            if named:
                _center(page, each_box, str(place), ink_on(color))

    return Item(what if named else f"{what}s 0-{len(colors) - 1}", paint, len(colors) * each)
