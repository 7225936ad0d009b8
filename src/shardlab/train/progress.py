"""Progress of a training run: one live line in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import math
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardlab.train.heartbeat import SILENCE, Heartbeat

PIPE_LINES = 10
"""How many lines a fast run prints where no line can be drawn over; a slow one prints more."""


class TrainingProgress:
    """Shows step, loss, tokens per second and milliseconds per step, on stderr. Use it as a context.

    Args:
        steps: of the run.
        silence: seconds after which a pipe gets a line in any case; a step ends with one after half as many.
    """

    def __init__(self, steps: int, silence: float = SILENCE) -> None:
        self._steps = steps
        self._silence = silence
        self._shown = time.monotonic()
        console = Console(file=sys.stderr)
        live = console.is_interactive
        self._lines = Heartbeat("starting", silence) if not live else None
        self._bar = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            disable=not live,
        )
        self._task = self._bar.add_task("starting", total=steps)

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        if self._lines is not None:
            self._lines.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()
        if self._lines is not None:
            self._lines.__exit__()

    def begin(self, what: str) -> None:
        """Something is under way that `show` does not end, or the first step is."""
        self._bar.update(self._task, description=what)
        if self._lines is not None:
            self._lines.doing = what

    def show(self, metrics: dict[str, Any]) -> None:
        """A step has ended, and the next one is under way."""
        loss = math.nan if metrics["loss"] is None else metrics["loss"]
        text = f"loss {loss:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s  {metrics['ms']:.0f} ms/step"
        done = metrics["step"] + 1
        self._bar.update(self._task, completed=done, description=text)
        if self._lines is not None:
            tenth = done % max(1, self._steps // PIPE_LINES) == 0
            now = time.monotonic()
            if tenth or done in (1, self._steps) or now - self._shown >= self._silence / 2:
                self._lines.say(f"step {done:>5}/{self._steps}  {text}")
                self._shown = now
            self._lines.doing = f"step {done + 1:>5}/{self._steps}"
