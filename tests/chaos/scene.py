"""What each scenario begins with: a run that nobody disturbed, and one that was interrupted at half of its steps."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.chaos.cases import words
from tests.chaos.comparing import wrong
from tests.chaos.moments import until
from tests.chaos.training import Training, environment
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
