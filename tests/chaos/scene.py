"""What each scenario begins with: a run that nobody disturbed, and one that was interrupted at half of its steps."""

# pyright: reportUnknownVariableType=false
# safetensors leaves some of its annotations out.

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.chaos.training import POLL, Training, environment
from tests.support.warm import WarmStarts

STEPS, EVERY, LIMIT = 24, 3, 120.0

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


class NotRun(Exception):
    """A scenario cannot be played on this machine; the message says what is missing."""


class Scene:
    """Runs for scenarios to disturb.

    Args:
        folder: where they lie.
        case: under what they train, on 2 ranks.

    Attributes:
        reference: the folder of the run that nobody disturbed.
        words: those of every run.
        line: the one that tells of what happened, in the scenario that is played.
    """

    def __init__(self, folder: Path, case: str = "fsdp") -> None:
        self.folder = folder
        self.reference = folder / "alone"
        self.words = words(case, STEPS, EVERY)
        self.line = ""
        self._warm = WarmStarts(environment())
        self._copies = 0
        alone = self.start(self.reference, "--keep", str(STEPS))
        assert not alone.ended(LIMIT), "the undisturbed run leaves processes behind"
        self._half = folder / "half"
        begun = self.start(self._half)
        halfway(begun)
        begun.signal([begun.process.pid], signal.SIGTERM)
        assert self.ended(begun) == [], begun.output

    def close(self) -> None:
        """End what it has started."""
        self._warm.close()

    def start(
        self, out: Path, *more: str, variables: Mapping[str, str] | None = None, launcher: Sequence[str] = ()
    ) -> Training:
        """Start a run, or go on with it."""
        warm = None if variables or launcher else self._warm
        return Training([*self.words, *more], out, more=variables, launcher=launcher, warm=warm)

    def copy(self) -> Path:
        """A copy of the interrupted run."""
        return Path(shutil.copytree(self._half, self.new()))

    def new(self) -> Path:
        """A folder that does not exist yet."""
        self._copies += 1
        return self.folder / f"run-{self._copies}"

    def ended(self, training: Training, *expected: str, last: bool = False, whole: bool = False) -> list[str]:
        """Wait for a run's end: what is wrong with it, with what it says, or with what it has saved.

        Args:
            expected: words that it has to say.
            last: whether they have to be in its last line.
            whole: whether it has to have come to its last step.
        """
        left = training.ended(LIMIT)
        found = [f"{len(left)} processes were left behind"] * bool(left)
        if whole and training.process.returncode:
            return [*found, f"it does not go on: {training.output.strip()[-400:]}"]
        if training.out.exists():
            found += wrong(training.out, self.reference, ended=whole)
        return found + self.heard(training.output, *expected, last=last)

    def goes_on(self, out: Path, *expected: str) -> list[str]:
        """What is wrong with a run that goes on to its end."""
        return self.ended(self.start(out), *expected, whole=True)

    def refused(self, words: Sequence[str], *expected: str) -> list[str]:
        """What is wrong with a command that must say what it cannot do, in a sentence with these words."""
        done = subprocess.run(
            [sys.executable, "-m", "shardlab", "train", *words],
            capture_output=True,
            env=environment(),
            text=True,
            timeout=LIMIT,
            check=False,
        )
        if done.returncode != 2 or "Traceback" in done.stderr:
            return [f"it ends with {done.returncode}: {done.stderr.strip()[-300:]}"]
        return self.heard(done.stderr, *expected, last=True)

    def heard(self, text: str, *expected: str, last: bool = False) -> list[str]:
        """What a text does not say that it has to; the line that says the first of it is remembered."""
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        lines = lines[-1:] if last else lines
        found = [line for line in lines if expected and expected[0] in line]
        self.line = self.line or (found[0] if found else "")
        text = "\n".join(lines)
        return [f"it does not say {word!r}: {text[-600:]}" for word in expected if word not in text]


def halfway(training: Training) -> None:
    """Wait until half of the steps are taken."""
    until(training, lambda: training.steps() >= STEPS // 2)


def storm(training: Training, pids: Sequence[int], number: int, times: int) -> None:
    """Send processes of a run a signal, again and again, within a third of a second."""
    for at in range(times):
        training.signal([pids[at % len(pids)]], number)
        time.sleep(0.03)


# Damage to a checkpoint's files, each with what a resumed run has to say of it.


Damage = Callable[[Path, random.Random], None]


def flip_a_bit(path: Path, chance: random.Random) -> None:
    """Flip one bit somewhere in a file."""
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def cut_off(path: Path, chance: random.Random) -> None:
    """Cut a file off somewhere, as a disk does that was full."""
    data = path.read_bytes()
    path.write_bytes(data[: chance.randrange(len(data))])


def remove(path: Path, chance: random.Random) -> None:
    """Remove a file."""
    path.unlink()


DAMAGES: dict[str, Damage] = {"a flipped bit": flip_a_bit, "a file cut off": cut_off, "a missing file": remove}


# Two runs compared bit by bit: what they saved, and what they wrote of their steps.


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors files in a folder, by file and name."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= {f"{path.name}: {name}": tensor for name, tensor in load_file(path).items()}
    return found


def different(here: Path, there: Path) -> list[str]:
    """Names of the tensors of two folders that differ in a bit, or that one of them lacks."""
    ours, theirs = tensors_of(here), tensors_of(there)
    names = sorted(ours.keys() | theirs.keys())
    return [name for name in names if name not in ours or name not in theirs or not _same(ours[name], theirs[name])]


def _same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(_bits(a), _bits(b)))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def checkpoints(run: Path) -> dict[str, Path]:
    """Complete checkpoints of a run, by name: those that have their name."""
    return {path.name: path for path in sorted((run / "checkpoints").glob("step-*")) if path.suffix != ".part"}


def losses(run: Path) -> list[tuple[int, float]]:
    """(step, loss) of each line of its metrics."""
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows]


def wrong(run: Path, reference: Path, *, ended: bool) -> list[str]:
    """What is wrong with a run, against one that nobody disturbed and that kept all its checkpoints.

    Args:
        ended: whether it has come to its end, with its weights.
    """
    found: list[str] = []
    known = checkpoints(reference)
    for name, folder in checkpoints(run).items():
        if name not in known:  # an interrupted run saves after whichever step it is at
            continue
        if names := different(folder, known[name]):
            found.append(f"{name} differs in {len(names)} tensors, the first {names[0]}")
    if ended:
        if losses(run) != losses(reference):
            found.append("the losses of its steps differ, or steps are missing or there twice")
        if names := different(run, reference):
            found.append(f"its weights differ in {len(names)} tensors, the first {names[0]}")
        if checkpoints(run).keys() != checkpoints(reference).keys() and not checkpoints(run):
            found.append("it has no checkpoint")
    return found


# Moments of a run at which something may happen to it.


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


# Scenarios in which processes are signalled, stopped and killed: a run says what happened, and goes on.


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


# The runs that are disturbed: one small model under strategies of every kind.


MODEL = "--hidden-size 32 --layers 4 --seq-len 32 --microbatches 4 --micro-batch-size 2"
"""Small, so that what takes time is what is tested: starts, saves and ends."""

CASES: dict[str, str] = {
    "single": "--strategy single --ranks 1",
    "ddp": "--strategy ddp --ranks 2",
    "zero-1": "--strategy zero-1 --ranks 2",
    "fsdp": "--strategy fsdp --ranks 2",
    "hsdp": "--strategy hsdp --ranks 4",
    "1f1b": "--strategy 1f1b --ranks 2",
    "tp": "--tp 2",
    "3d": "--pp 2 --dp-shard 2 --tp 2 --schedule 1f1b",
}
"""Flags of `shardlab train`, by name."""


def words(case: str, steps: int, every: int) -> list[str]:
    """The words after `shardlab train` of a run that saves after every so many steps, and goes on by itself.

    Args:
        case: a name, or a file's strategy, which is run on 2 ranks.
    """
    saving = f"--steps {steps} --save-every {every} --resume auto"
    return f"{CASES.get(case, f'--strategy {case} --ranks 2')} {MODEL} {saving}".split()
