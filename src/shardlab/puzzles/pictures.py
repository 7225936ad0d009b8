"""Pictures of timelines and of values, drawn when they are first looked at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path

from shardlab.program import Spec
from shardlab.program.files import write_whole
from shardlab.timeline import Timeline


class Picture:
    """An SVG that shows itself in a notebook."""

    def __init__(self, make: Callable[[], str]) -> None:
        self._make = make

    @cached_property
    def svg(self) -> str:
        """The picture as an SVG document."""
        return self._make()

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: Path | str) -> None:
        """Write the SVG to a file."""
        write_whole(Path(path), self.svg)


def timeline_picture(timeline: Timeline, title: str = "", note: str = "") -> Picture:
    """A row for each rank with what it did when, and memory below."""

    def make() -> str:
        from shardlab.draw import timeline_svg

        return timeline_svg(timeline, title, note=note)

    return Picture(make)


def network_picture(specs: Sequence[Spec], layers: int, batches: int, elements: float) -> Picture:
    """Values filled into a network of so many layers and microbatches."""

    def make() -> str:
        from shardlab.draw import network_svg

        title = str(specs[0]) if len(specs) == 1 else f"{len(specs)} values"
        return network_svg(specs, layers, batches, title, f"{elements:,.0f} elements")

    return Picture(make)
