"""Progress of a measurement on stderr, and the rules of a race between jobs.

`Progress` prints one live line in a terminal, and a few lines in a pipe. A `Race` times jobs that are predicted to be
about equally fast: they alternate their steps in the same processes.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.train.data import DataSource

PIPE_LINES = 10
"""Number of lines that are printed in a pipe."""


class Progress:
    """Display of the number of completed measurements.

    Args:
        total: number of measurements.
        show: whether anything is shown.
    """

    def __init__(self, total: int, show: bool = True) -> None:
        console = Console(file=sys.stderr)
        self._total, self._count, self._text = total, 0, ""
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
        """Name the next measurement."""
        self._text = text
        self._bar.update(self._task, description=text)

    def step(self) -> None:
        """Count one measurement."""
        self._count += 1
        self._bar.update(self._task, completed=self._count)
        if self._pipe and (self._count % max(1, self._total // PIPE_LINES) == 0 or self._count == self._total):
            print(f"{self._count:>5}/{self._total}  {self._text}", file=sys.stderr, flush=True)

    def stop(self) -> None:
        self._bar.stop()


DROP_FACTORS = {3: 1.25, 8: 1.1}
"""Factors by number of rounds. After that many rounds, a job is dropped if its median step takes at least this factor
times as long as that of the fastest job."""


@dataclass(frozen=True)
class Race:
    """Rules of a race between jobs that alternate their steps.

    Attributes:
        rounds: largest number of timed steps of each job.
        seconds: time after which no further round begins.
        always: indices of jobs that are never dropped.
        optimizer: settings of the optimizer.
        data: sources of the tokens (empty: the default text).
        init: folder of weights whose tokenizer encodes the texts (None: bytes are tokens).
    """

    rounds: int = 40
    seconds: float = 30.0
    always: Collection[int] = ()
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    data: Sequence[DataSource] = ()
    init: Path | None = None

    def select_jobs(self, active: Sequence[int], times: Sequence[Sequence[float]]) -> list[int]:
        """Return the indices of the jobs that run in the next round.

        Args:
            active: indices of the jobs that ran in the last round.
            times: seconds of each job's steps so far.
        """
        factor = DROP_FACTORS.get(max(map(len, times)))
        if factor is None:
            return [*active]
        fastest = min(median(job_times) for job_times in times)
        return [index for index in active if index in self.always or median(times[index]) < factor * fastest]
