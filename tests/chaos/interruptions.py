"""Scenarios in which processes are signalled, stopped and killed: a run says what happened, and goes on."""

from __future__ import annotations

import signal
from functools import partial

from tests.chaos.moments import until
from tests.chaos.scene import TORCHRUN, Scene, halfway, storm

TIMEOUT = ("--timeout", "4")


def warned(scene: Scene, number: int) -> list[str]:
    """A signal that asks for the end: the run saves, says how to go on, and does."""
    out = scene.new()
    training = scene.start(out)
    halfway(training)
    training.signal([training.process.pid], number)
    found = scene.ended(training, "go on after step")
    return (
        found + [f"it ends with {training.process.returncode}"] * bool(training.process.returncode) + scene.goes_on(out)
    )


def stormed(scene: Scene, *, everybody: bool) -> list[str]:
    """Ten SIGTERMs within a third of a second: the run ends at once or after saving, and goes on."""
    out = scene.new()
    training = scene.start(out)
    halfway(training)
    storm(training, training.processes() if everybody else [training.process.pid], signal.SIGTERM, 10)
    return scene.ended(training, "go on after step") + scene.goes_on(out)


def stopped(scene: Scene, rank: int, *, torchrun: bool = False) -> list[str]:
    """A rank that is stopped for longer than the timeout: the report names it, and the run goes on."""
    out = scene.new()
    training = scene.start(out, *TIMEOUT, launcher=TORCHRUN if torchrun else ())
    halfway(training)
    training.signal([training.ranks()[rank]], signal.SIGSTOP)
    verdict = f"shardlab: rank {rank} is stopped (SIGSTOP, or a debugger), and the run ended after the 4 s of --timeout"
    return scene.ended(training, verdict, last=not torchrun) + scene.goes_on(out)


def both_killed(scene: Scene) -> list[str]:
    """Two ranks are killed at once."""
    out = scene.new()
    training = scene.start(out)
    halfway(training)
    training.signal(training.ranks(), signal.SIGKILL)
    verdict = "ranks 0-1 were killed (SIGKILL; out of memory?), and the run ended with them."
    return scene.ended(training, verdict, last=True) + scene.goes_on(out)


def command_killed(scene: Scene, *, torchrun: bool) -> list[str]:
    """Whoever started the ranks is killed: they save and end by themselves."""
    out, launcher = scene.new(), TORCHRUN if torchrun else ()
    training = scene.start(out, launcher=launcher)
    halfway(training)
    training.signal([training.process.pid], signal.SIGKILL)
    found = scene.ended(training, "go on after step")
    return found + scene.ended(scene.start(out, launcher=launcher), whole=True)


def restarted(scene: Scene) -> list[str]:
    """torchrun starts the ranks again when one is killed, and the run goes on by itself."""
    training = scene.start(scene.new(), launcher=(*TORCHRUN, "--max-restarts", "1"))
    halfway(training)
    training.signal([training.ranks()[0]], signal.SIGKILL)
    return scene.ended(training, "resumed after step", whole=True)


def in_use(scene: Scene) -> list[str]:
    """A second command on the folder of a run that is under way."""
    out = scene.new()
    first = scene.start(out)
    until(first, lambda: first.steps() > 0)
    everybody = first.processes()
    first.signal(everybody, signal.SIGSTOP)
    found = scene.refused([*scene.words, "--out", str(out)], f"{out} is in use by another process")
    first.signal(everybody, signal.SIGCONT)
    return found + scene.ended(first, whole=True)


INTERRUPTIONS = {
    "SIGTERM": partial(warned, number=signal.SIGTERM),
    "SIGUSR1, a scheduler's warning": partial(warned, number=signal.SIGUSR1),
    "ten SIGTERMs to the command": partial(stormed, everybody=False),
    "ten SIGTERMs to all processes": partial(stormed, everybody=True),
    "rank 0 stopped": partial(stopped, rank=0),
    "rank 1 stopped": partial(stopped, rank=1),
    "rank 0 stopped under torchrun": partial(stopped, rank=0, torchrun=True),
    "two ranks killed at once": both_killed,
    "the command killed": partial(command_killed, torchrun=False),
    "torchrun killed": partial(command_killed, torchrun=True),
    "rank 0 killed under torchrun --max-restarts": restarted,
    "a folder in use": in_use,
}
