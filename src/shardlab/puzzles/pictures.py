"""Pictures of what a solution did, and of the values that it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from shardlab.program.files import write_whole
from shardlab.puzzles.model import Model
from shardlab.puzzles.timeline import timeline_of
from shardlab.puzzles.values import Value


class Picture:
    """An SVG that shows itself in a notebook; it is drawn when it is first looked at."""

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


def draw(models: Sequence[Model]) -> Picture:
    """Print when the last op starts and where memory is largest; the picture of what the ranks did."""
    events = [event for model in models for event in model.log]
    if events:
        steps = max(model.log[-1].time for model in models if model.log)
        peak = max(events, key=lambda event: event.memory)  # the first of equals
        where = next(i for i, model in enumerate(models) if any(event is peak for event in model.log))
        print(f"Timesteps: {steps} \nMaximum Memory: {peak.memory} at GPU: {where} time: {peak.time}")
    else:
        print("Timesteps: 0 \nMaximum Memory: 0: nothing has been computed")
    return picture_of(models)


def picture_of(models: Sequence[Model], title: str = "") -> Picture:
    """A row for each rank with what it did when, and memory below."""
    timeline = timeline_of(models)

    def make() -> str:
        from shardlab.draw import timeline_svg

        return timeline_svg(timeline, title)

    return Picture(make)


def draw_group(group: Mapping[Any, Value]) -> Picture:
    """All values of a store, laid over one network."""
    return network(list(group.values()))


def network(values: Sequence[Value]) -> Picture:
    """Values filled into the network that they belong to."""
    layers = max((max(value.layers, value.layer + 1) for value in values), default=1)
    batches = max((value.total_batches for value in values), default=1)
    specs = [value.spec for value in values]
    title = str(specs[0]) if len(specs) == 1 else f"{len(specs)} values"
    note = f"{sum(value.memory() for value in values):,.0f} elements"

    def make() -> str:
        from shardlab.draw import network_svg

        return network_svg(specs, layers, batches, title, note)

    return Picture(make)
