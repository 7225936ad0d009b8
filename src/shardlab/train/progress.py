"""Progress of a training run: lines that stay, and in a terminal a live line and a bar below them."""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardlab.train import heartbeat
from shardlab.train.heartbeat import Heartbeat
from shardlab.train.saved import VALIDATION, VALIDATION_EMA

LINES = 10
"""How many lines a fast run leaves whose every step is logged; a slow one leaves more."""

RECENT = 50
"""Steps by which the time left is told."""


def figures(
    metrics: Mapping[str, Any], left: float | None = None, own: Mapping[str, float] | None = None
) -> Iterator[str]:
    """A step's figures as a person reads them, those first that are wanted first; docs/training.md defines them.

    Args:
        left: seconds until the last step ends, if that is known.
        own: further figures, of the user's callbacks.
    """
    yield f"loss {math.nan if metrics['loss'] is None else metrics['loss']:.3f}"
    for name in (VALIDATION, VALIDATION_EMA):
        if name in metrics:
            yield f"{name.replace('_', ' ')} {metrics[name]:.3f}"
    yield f"lr {metrics['learning_rate']:.3g}"
    if metrics["grad_norm"] is not None:
        yield f"norm {metrics['grad_norm']:.3g}"
    yield f"tps {metrics['tps']:,.0f}"
    if left is not None:
        yield f"left {clock(left)}"
    for name, figure in (own or {}).items():
        yield f"{name.replace('_', ' ')} {figure:.4g}"
    yield f"dt {metrics['dt']:.3f}"
    if metrics["mfu"] is not None:
        yield f"mfu {metrics['mfu']:.1%}"
    yield f"dtf {metrics['dtf']:.3f} dtb {metrics['dtb']:.3f}"
    yield f"sps {metrics['sps']:.1f}"
    yield f"sps_per_gpu {metrics['sps_per_gpu']:.1f} tps_per_gpu {metrics['tps_per_gpu']:,.0f}"


def clock(seconds: float) -> str:
    """Spell a time as clocks do.

    >>> clock(7.2), clock(3725)
    ('0:07', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def fitted(pieces: Iterator[str], width: int | None) -> str:
    """Put as many pieces into a line as fit into so many columns (None: all), in their order; the first in any case.

    >>> fitted(iter(["step 1", "loss 2.000", "norm 3"]), 17), fitted(iter(["step 1"]), 3)
    ('step 1 loss 2.000', 'step 1')
    """
    line = next(pieces, "")
    for piece in pieces:
        if width is not None and len(line) + 1 + len(piece) > width:
            break
        line += f" {piece}"
    return line


class TrainingProgress:
    """Shows a step's number, loss, times and speeds, on stderr. Use it as a context.

    A line stays of each step that is logged or validated; where every step is logged, of a tenth of the run's, and of
    more if they are slow. A terminal has the newest step live below, and a bar.

    Args:
        steps: of the run.
        log_every: how many steps apart those are that are logged.
        silence: seconds after which a pipe gets a line in any case, by default `heartbeat.SILENCE`. A step ends with
            one after half as many.
        console: where it is shown (None: on stderr).
    """

    def __init__(
        self, steps: int, log_every: int = 1, silence: float | None = None, console: Console | None = None
    ) -> None:
        self._steps = steps
        self._every = log_every if log_every > 1 else max(1, steps // LINES)
        self._thinned = log_every == 1
        self._silence = heartbeat.SILENCE if silence is None else silence
        self._printed = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._done = 0
        self._doing = "starting"
        self._own: Mapping[str, float] = {}
        self._metrics: Mapping[str, Any] | None = None
        self._console = console or Console(file=sys.stderr)
        live = self._console.is_interactive
        self._lines = Heartbeat("starting", self._silence) if not live else None
        self._live = Live(self, console=self._console, transient=True, refresh_per_second=4) if live else None

    def __enter__(self) -> TrainingProgress:
        for shown in (self._live, self._lines):
            if shown is not None:
                shown.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        if self._lines is not None:
            self._lines.__exit__()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The newest step in one line, or what is under way; and a bar."""
        width, doing = options.max_width, self._doing
        metrics = None if doing else self._metrics
        line = self._line({}, doing) if metrics is None else self._line(metrics, width=width)
        yield Text(line, no_wrap=True, overflow="crop")
        share = f"{self._done / max(1, self._steps):4.0%}"
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(width=len(share))
        bar.add_row(ProgressBar(self._steps, self._done), share)
        yield bar

    def begin(self, what: str) -> None:
        """Something is under way that `show` does not end, or the first step is."""
        self._doing = what
        if self._lines is not None:
            self._lines.doing = what

    def say(self, text: str) -> None:
        """Print a text, of any number of lines, above what is live."""
        if self._lines is not None:
            self._lines.say(text)
        else:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def validated(self, losses: Mapping[str, float]) -> None:
        """Say what a validation beside the steps has found."""
        self.say(self._line({}, *(f"{name.replace('_', ' ')} {loss:.3f}" for name, loss in losses.items())))

    def show(self, metrics: dict[str, Any], own: Mapping[str, float] | None = None) -> None:
        """A step has ended, and the next one is under way.

        Args:
            own: those of its figures that the user's callbacks have returned.
        """
        now = time.monotonic()
        self._own = own or {}
        self._metrics, self._done, self._doing = metrics, metrics["step"] + 1, ""
        self._ends.append((self._done, now))
        late = (self._thinned or self._live is None) and now - self._printed >= self._silence / 2
        if self._done in (1, self._steps) or self._done % self._every == 0 or VALIDATION in metrics or late:
            self.say(self._line(metrics, width=None if self._live is None else self._console.width))
            self._printed = now
        if self._lines is not None:
            self._lines.doing = f"step {self._done + 1:>5}/{self._steps}"

    def _line(self, metrics: Mapping[str, Any], *words: str, width: int | None = None) -> str:
        """A step's number, and its figures, or some words."""
        pieces = figures(metrics, self._left(metrics), self._own) if metrics else iter(words)
        head = f"step {self._done:>5}/{self._steps} "
        return fitted(iter([head, *pieces]), width)

    def _left(self, metrics: Mapping[str, Any]) -> float:
        """Seconds that the steps to come take, by the pace of the recent ones, with what came between them."""
        (first, began), (last, ended) = self._ends[0], self._ends[-1]
        pace = (ended - began) / (last - first) if last > first else metrics["dt"]
        return pace * (self._steps - self._done)
