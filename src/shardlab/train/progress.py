"""Progress of a training run: one live line in a terminal, a line now and then in a pipe."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from shardlab.train import heartbeat
from shardlab.train.figures import VALIDATION, VALIDATION_EMA
from shardlab.train.heartbeat import Heartbeat

PIPE_LINES = 10
"""How many lines a fast run prints where no line can be drawn over; a slow one prints more."""


def as_line(metrics: Mapping[str, Any]) -> str:
    """A step's figures as a person reads them; docs/training.md defines them."""
    loss = math.nan if metrics["loss"] is None else metrics["loss"]
    mfu = "" if metrics["mfu"] is None else f" mfu {metrics['mfu']:.1%}"
    each = f" tps_per_gpu {metrics['tps_per_gpu']:,.0f}"
    return (
        f"loss {loss:.3f} dt {metrics['dt']:.3f} dtf {metrics['dtf']:.3f} dtb {metrics['dtb']:.3f} "
        f"sps {metrics['sps']:.1f} sps_per_gpu {metrics['sps_per_gpu']:.1f} tps {metrics['tps']:,.0f}{each}{mfu}"
    )


class TrainingProgress:
    """Shows a step's number, loss, times and speeds, on stderr. Use it as a context.

    Args:
        steps: of the run.
        silence: seconds after which a pipe gets a line in any case, by default `heartbeat.SILENCE`. A step ends with
            one after half as many.
    """

    def __init__(self, steps: int, silence: float | None = None) -> None:
        self._steps = steps
        self._silence = heartbeat.SILENCE if silence is None else silence
        self._shown = time.monotonic()
        console = Console(file=sys.stderr)
        live = console.is_interactive
        self._lines = Heartbeat("starting", self._silence) if not live else None
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

    def say(self, text: str) -> None:
        """Print a text, of any number of lines, above what is live."""
        if self._lines is not None:
            self._lines.say(text)
        else:
            self._bar.console.print(text, markup=False, highlight=False)

    def show(self, metrics: dict[str, Any]) -> None:
        """A step has ended, and the next one is under way."""
        text = as_line(metrics)
        for name in (VALIDATION, VALIDATION_EMA):
            if name in metrics:
                text += f" {name.replace('_', ' ')} {metrics[name]:.3f}"
        done = metrics["step"] + 1
        self._bar.update(self._task, completed=done, description=text)
        if self._lines is not None:
            tenth = done % max(1, self._steps // PIPE_LINES) == 0
            now = time.monotonic()
            if tenth or VALIDATION in metrics or done in (1, self._steps) or now - self._shown >= self._silence / 2:
                self._lines.say(f"step {done:>5}/{self._steps}  {text}")
                self._shown = now
            self._lines.doing = f"step {done + 1:>5}/{self._steps}"
