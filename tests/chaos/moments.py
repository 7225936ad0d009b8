"""Moments of a run at which something may happen to it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from tests.chaos.comparing import checkpoints
from tests.chaos.training import POLL, Training

Moment = Callable[[Training, random.Random], None]
"""Waits for its moment of a run, or for the run's end."""

START = 8.0
"""Seconds within which a start lies: processes, imports, connections, the check."""

STEP = 0.1
"""Seconds within which a step, or a small checkpoint, lies."""


def until(training: Training, condition: Callable[[], object]) -> None:
    """Wait until something holds, or the run has ended."""
    while training.running and not condition():
        time.sleep(POLL)


def start_up(training: Training, chance: random.Random) -> None:
    """Anywhere between the command and the first step."""
    over = time.monotonic() + chance.uniform(0, START)
    steps = training.steps()
    until(training, lambda: time.monotonic() > over or training.steps() > steps)


def load(training: Training, chance: random.Random) -> None:
    """While a checkpoint is read; the first start has none, and comes to its first step."""
    steps = training.steps()
    until(training, lambda: training.reads_a_checkpoint() or training.steps() > steps)
    time.sleep(chance.uniform(0, STEP))


def step(training: Training, chance: random.Random) -> None:
    """In one of the next steps of a run that has a checkpoint."""
    wanted = training.steps() + chance.randrange(1, 4)
    until(training, lambda: training.steps() >= wanted and checkpoints(training.out))
    time.sleep(chance.uniform(0, STEP))


def save(training: Training, chance: random.Random) -> None:
    """While a checkpoint is written."""
    until(training, lambda: training.saving() is not None)
    time.sleep(chance.uniform(0, STEP / 5))


def commit(training: Training, chance: random.Random) -> None:
    """When a checkpoint is written and about to get its name, or has just got it."""
    until(training, training.committing)
    time.sleep(chance.choice((0.0, 0.0005, 0.002)))


MOMENTS: dict[str, Moment] = {"start": start_up, "load": load, "step": step, "save": save, "commit": commit}
