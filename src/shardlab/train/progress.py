"""What a training run shows while it goes on: one live line in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

PIPE_LINES = 10
"""How many lines a run prints where no line can be drawn over."""


class TrainingProgress:
    """Shows step, loss, tokens per second and milliseconds per step, on stderr."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        console = Console(file=sys.stderr)
        self._live = console.is_terminal
        self._bar = Progress(
            TextColumn("step {task.completed:>5.0f}/{task.total:.0f}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(compact=True),
            console=console,
            expand=True,
            disable=not self._live,
        )
        self._task = self._bar.add_task("starting", total=steps)
        self._bar.start()

    def show(self, metrics: dict[str, Any]) -> None:
        """A step has ended."""
        text = f"loss {metrics['loss']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s  {metrics['ms']:.0f} ms/step"
        done = metrics["step"] + 1
        self._bar.update(self._task, completed=done, description=text)
        if not self._live and (done % max(1, self._steps // PIPE_LINES) == 0 or done in (1, self._steps)):
            print(f"step {done:>5}/{self._steps}  {text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._bar.stop()
