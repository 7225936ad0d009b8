"""Runs side by side: each is predicted alone, so every core takes the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from shardlab.published.outcomes import Outcome, outcome_of


def outcomes_of(rows: Sequence[dict[str, Any]]) -> Iterator[Outcome]:
    """What came of every row, in the order of the rows, each as soon as it and those before it are known.

    Processes are spawned, since a progress bar's thread would not survive a fork; when the user interrupts, they end
    with the command and say nothing of their own.
    """
    processes = min(len(rows), os.cpu_count() or 1)
    if processes < 2:
        yield from map(outcome_of, rows)
        return
    with ProcessPoolExecutor(processes, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_DFL)) as pool:
        yield from pool.map(outcome_of, rows)
