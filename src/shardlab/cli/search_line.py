"""Line of a search's progress, live on a terminal."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from shardlab.rules.pieces import counted
from shardlab.timeline.units import seconds_text

if TYPE_CHECKING:
    from shardlab.planner.found import Found
    from shardlab.planner.search import Told

REFRESHED = 0.1
"""Seconds after which a search's progress is shown anew."""


class SearchLine:
    """A live line of a search's progress, on a terminal alone.

    Args:
        console: where it is shown.
    """

    def __init__(self, console: Console) -> None:
        columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
        # No thread may refresh it: workers are forked while it is shown
        self._progress = Progress(
            *columns, console=console, transient=True, auto_refresh=False, disable=not console.is_terminal
        )
        self._next = 0.0

    def __enter__(self) -> Told:
        self._task = self._progress.add_task("generating plans")
        self._progress.start()
        return self._tell

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def _tell(self, found: Found, waiting: int) -> None:
        if (now := time.monotonic()) < self._next:
            return
        self._next = now + REFRESHED
        best = f"; best so far {seconds_text(found.best.seconds)} a step" if found.best else ""
        text = f"{counted(len(found.outcomes), 'plan')} simulated, {waiting:,} wait{best}"
        self._progress.update(self._task, description=text, refresh=True)
