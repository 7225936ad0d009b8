"""Files that show a step: a drawing of its timeline, and a trace for viewers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from shardlab.cli.new_file import check_new_file, writing
from shardlab.cli.options import Flag, NewFile
from shardlab.program import UserError
from shardlab.program.picture import ColorBy
from shardlab.timeline import Timeline
from shardlab.timeline.counters import Counter

if TYPE_CHECKING:
    from shardlab.draw.trace import Shown

MOST_DRAWN = 500_000
"""Events in a picture: a matter of seconds."""


@dataclass(frozen=True)
class Pictures:
    """Options of the files that show a step."""

    svg: NewFile = None
    """Draw the timeline of the step into this file; for a comparison, both timelines; with --passes, the timelines
    before the first pass and after each pass."""

    color_by: Annotated[ColorBy, tyro.conf.arg(metavar="{pass,layer}")] = "pass"
    """Meaning of the colours: the pass (forward, backward, input gradient, weight gradient), or the layer."""

    trace: NewFile = None
    """Write the timelines into this file, for Perfetto (ui.perfetto.dev) and Chrome."""

    force: Flag = False
    """Replace files that Shardlab did not write."""

    @property
    def files(self) -> list[Path]:
        """The files that are wanted."""
        return [path for path in (self.svg, self.trace) if path is not None]

    def check(self, example: str) -> None:
        """Refuse files that cannot be written, that are one, or that would replace a user's.

        Raises:
            UserError: if so, or if there is none that could be replaced.
        """
        if self.force and not self.files:
            raise UserError("--force replaces files, but no file is written; give --svg or --trace, or leave it out")
        check_new_file("--svg", self.svg, example, force=self.force)
        check_new_file("--trace", self.trace, "trace.json", force=self.force)
        if self.svg is not None and self.trace is not None and self.svg.resolve() == self.trace.resolve():
            raise UserError(f"--svg and --trace are both {self.svg}; give them different files")

    def save(self, timeline: Timeline, name: str, counters: Sequence[Counter] | None = None) -> None:
        """Write a timeline of what has such a name into the files that are wanted."""
        if self.svg is not None:
            self._draw(timeline, self.svg, f"{name}: one optimizer step")
        self.save_trace({"": (timeline, counters)})

    def save_each(self, timelines: Mapping[str, Timeline], name: str) -> None:
        """Write timelines of what has such a name, each under its own, into the files that are wanted."""
        if self.svg is not None:
            from shardlab.draw import save_comparison
            from shardlab.draw.comparison import MILLISECONDS
            from shardlab.draw.timeline import UNIT_TIME

            _want_few(sum(len(events) for timeline in timelines.values() for events in timeline.events), self.svg)
            in_seconds = any(timeline.in_seconds for timeline in timelines.values())
            with writing("--svg", self.svg):
                unit = MILLISECONDS if in_seconds else UNIT_TIME
                save_comparison(timelines, self.svg, f"{name}: one optimizer step", self.color_by, unit)
        self.save_trace({each: (timeline, None) for each, timeline in timelines.items()})

    def _draw(self, timeline: Timeline, path: Path, title: str) -> None:
        from shardlab.draw import save_timeline  # matplotlib takes longer to import than most simulations take
        from shardlab.draw.timeline import UNIT_TIME

        _want_few(sum(map(len, timeline.events)), path)
        with writing("--svg", path):
            unit = "time (seconds)" if timeline.in_seconds else UNIT_TIME
            save_timeline(timeline, path, title, unit, self.color_by)

    def save_trace(self, shown: Mapping[str, Shown]) -> None:
        """Write timelines for trace viewers, each under its name, if that is wanted."""
        if self.trace is None:
            return
        from shardlab.draw.trace import save_trace_events

        with writing("--trace", self.trace):
            save_trace_events(shown, self.trace)


def _want_few(count: int, path: Path) -> None:
    if count > MOST_DRAWN:
        raise UserError(
            f"--svg {path}: {count:,} events are too many for a picture of at most {MOST_DRAWN:,}; "
            "write --trace, or take fewer microbatches"
        )


NO_PICTURES = Pictures()

PictureFlags = Annotated[Pictures, tyro.conf.OmitArgPrefixes, tyro.conf.arg(name="")]
"""The options, as a command's field; their names stand alone."""
