"""Progress of a bench on stderr: one live line in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

PIPE_LINES = 10
"""How many lines a bench prints where no line can be drawn over."""


class Progress:
    """Counts what has been measured.

    Args:
        total: how many points there will be.
        show: whether anything is shown.
    """

    def __init__(self, total: int, show: bool = True) -> None:
        console = Console(file=sys.stderr)
        self._total, self._done, self._text = total, 0, ""
        self._pipe = show and not console.is_terminal
        self._bar = RichProgress(
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            transient=True,
            disable=not show or self._pipe,
        )
        self._task = self._bar.add_task("starting", total=total)
        self._bar.start()

    def say(self, text: str) -> None:
        """Name the thing that is measured next."""
        self._text = text
        self._bar.update(self._task, description=text)

    def step(self) -> None:
        """Count one thing that has been measured."""
        self._done += 1
        self._bar.update(self._task, completed=self._done)
        if self._pipe and (self._done % max(1, self._total // PIPE_LINES) == 0 or self._done == self._total):
            print(f"{self._done:>5}/{self._total}  {self._text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._bar.stop()
