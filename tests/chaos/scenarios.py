"""What may happen to a run beside kills, each with what must come of it.

    python -m tests.chaos.scenarios

Every scenario has a run that was interrupted at half of its steps, disturbs it or its files, and lets it go on; its
losses, weights and checkpoints must be those of a run that nobody disturbed. Scenarios with disks of their own need
root, and say so where it is missing.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from tests.chaos.cases import words
from tests.chaos.comparing import checkpoints, wrong
from tests.chaos.damage import DAMAGES, Damage, files_of
from tests.chaos.moments import until
from tests.chaos.training import Training

CASE, STEPS, EVERY, LIMIT = "fsdp", 24, 3, 120.0


class Scene:
    """A run that nobody disturbed, and one that was interrupted: each scenario goes on with a copy of the second."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reference = folder / "alone"
        self.words = words(CASE, STEPS, EVERY)
        self.copies = 0
        alone = Training([*self.words, "--keep", str(STEPS)], self.reference)
        assert not alone.ended(LIMIT), "the undisturbed run leaves processes behind"
        self.half = folder / "half"
        self.interrupted = self.stopped(self.half, signal.SIGTERM)

    def stopped(self, out: Path, number: int, times: int = 1) -> list[str]:
        """Start a run, and send it a signal after half of its steps; what is wrong with how it ended."""
        training = Training(self.words, out)
        until(training, lambda: training.steps() >= STEPS // 2)
        for _ in range(times):
            training.signal([training.process.pid], number)
            time.sleep(0.03)
        left = training.ended(LIMIT)
        bad = [f"{len(left)} processes were left behind"] * bool(left)
        return bad + wrong(out, self.reference, ended=False)

    def copy(self) -> Path:
        """A copy of the interrupted run."""
        self.copies += 1
        return Path(shutil.copytree(self.half, self.folder / f"copy-{self.copies}"))

    def goes_on(self, out: Path) -> list[str]:
        """What is wrong with a run that goes on to its end."""
        training = Training(self.words, out)
        training.ended(LIMIT)
        if training.process.returncode:
            return [f"it does not go on: {said_by(training)}"]
        return wrong(out, self.reference, ended=True)

    def refused(self, words: list[str], *expected: str) -> list[str]:
        """What is wrong with a command that must say what it cannot do, in a sentence with these words."""
        done = subprocess.run(
            [sys.executable, "-m", "shardlab", "train", *words],
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
        said = done.stderr.strip()
        if done.returncode != 2 or "Traceback" in said:
            return [f"it ends with {done.returncode}: {said[-300:]}"]
        return [f"it does not say {word!r}: {said}" for word in expected if word not in said]


def said_by(training: Training) -> str:
    """The end of what a run has said."""
    return training.log.read_text(errors="replace").strip()[-400:]


def interrupted(scene: Scene) -> list[str]:
    """SIGTERM: the run saves, ends, and goes on."""
    return scene.interrupted + scene.goes_on(scene.copy())


def warned(scene: Scene) -> list[str]:
    """SIGUSR1, a scheduler's warning, does the same."""
    out = scene.folder / "warned"
    return scene.stopped(out, signal.SIGUSR1) + scene.goes_on(out)


def storm(scene: Scene) -> list[str]:
    """Ten SIGTERMs within a third of a second."""
    out = scene.folder / "storm"
    return scene.stopped(out, signal.SIGTERM, times=10) + scene.goes_on(out)


def damaged(scene: Scene, damage: Damage, name: str) -> list[str]:
    """Damage to one file of the newest checkpoint: it is named, and the run goes on from the one before."""
    out = scene.copy()
    newest = list(checkpoints(out).values())[-1]
    damage(newest / name, random.Random(name))
    found = scene.refused(["--resume", str(out)], name)
    return found + scene.goes_on(out)


def nothing_complete(scene: Scene) -> list[str]:
    """All checkpoints are damaged: a sentence, and nothing is overwritten."""
    out = scene.copy()
    for folder in checkpoints(out).values():
        (folder / "manifest.json").unlink()
    before = (out / "metrics.jsonl").read_bytes()
    found = scene.refused(["--resume", str(out)], "manifest.json")
    return found + ["the metrics have changed"] * ((out / "metrics.jsonl").read_bytes() != before)


def another_model(scene: Scene) -> list[str]:
    """A checkpoint of another model."""
    return scene.refused(["--resume", str(scene.copy()), "--hidden-size", "48"], "hidden_size")


def another_version(scene: Scene) -> list[str]:
    """A checkpoint of a format that is not known."""
    out = scene.copy()
    for folder in checkpoints(out).values():
        manifest = folder / "manifest.json"
        manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 99'))
    return scene.refused(["--resume", str(out)], "version 99")


def in_use(scene: Scene) -> list[str]:
    """A second command on the folder of a run that is under way."""
    out = scene.folder / "used"
    first = Training(scene.words, out)
    until(first, lambda: first.steps() > 0)
    everybody = first.processes()
    first.signal(everybody, signal.SIGSTOP)
    found = scene.refused([*scene.words, "--out", str(out)], str(out))
    first.signal(everybody, signal.SIGCONT)
    first.ended(LIMIT)
    return found + wrong(out, scene.reference, ended=True)


def disk_full(scene: Scene) -> list[str]:
    """A disk that is full when a checkpoint is written: the ones before stay, and with room the run goes on."""
    with disk(scene.folder / "small", "6m") as small:
        out = small / "run"
        shutil.copytree(scene.half, out)
        filler = small / "filler"
        with filler.open("wb") as file:
            free = shutil.disk_usage(small).free
            file.write(bytes(max(0, free - 40_000)))
        training = Training(scene.words, out)
        left = training.ended(LIMIT)
        found = [f"{len(left)} processes were left behind"] * bool(left) + wrong(out, scene.reference, ended=False)
        filler.unlink()
        return found + (["no checkpoint is left"] if not checkpoints(out) else scene.goes_on(out))


def read_only(scene: Scene) -> list[str]:
    """A disk that cannot be written: a sentence."""
    with disk(scene.folder / "fixed", "8m") as fixed:
        out = fixed / "run"
        shutil.copytree(scene.half, out)
        subprocess.run(["mount", "-o", "remount,ro", str(fixed)], check=True)
        return scene.refused(["--resume", str(out)], str(out))


@contextmanager
def disk(path: Path, size: str) -> Generator[Path]:
    """A small disk of its own."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def scenarios(scene: Scene) -> dict[str, Callable[[], list[str]]]:
    """All scenarios by name; those that need root only where it is there."""
    plain = (interrupted, warned, storm, nothing_complete, another_model, another_version, in_use)
    found: dict[str, Callable[[], list[str]]] = {each.__name__: lambda each=each: each(scene) for each in plain}
    newest = list(checkpoints(scene.half).values())[-1]
    for kind, damage in DAMAGES.items():
        for path in files_of(newest):
            found[f"{kind}: {path.name}"] = lambda damage=damage, path=path: damaged(scene, damage, path.name)
    if os.geteuid() == 0:
        found |= {each.__name__: lambda each=each: each(scene) for each in (disk_full, read_only)}
    return found


def main(only: tuple[str, ...] = ()) -> int:
    """Play the scenarios.

    Args:
        only: those whose names begin so; all without it.
    """
    console, bad = Console(), 0
    table = Table("scenario", "seconds", "wrong")
    with tempfile.TemporaryDirectory() as temporary, console.status("two runs to begin with") as status:
        for name, play in scenarios(Scene(Path(temporary))).items():
            if only and not name.startswith(only):
                continue
            status.update(name)
            began = time.monotonic()
            found = play()
            bad += bool(found)
            table.add_row(name, f"{time.monotonic() - began:.1f}", "\n".join(found) or "nothing")
    console.print(table)
    if os.geteuid() != 0:
        console.print("disk_full and read_only were not played: they mount a disk, which takes root")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
