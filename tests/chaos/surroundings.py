"""Scenarios in which the machine around a run changes: its disk fills, or is read-only; its clock is set back."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.scene import NotRun, Scene, checkpoints, halfway, until


def disk_full(scene: Scene) -> list[str]:
    """A disk that is full when a checkpoint is written: the ones before stay, and with room the run goes on."""
    with disk(scene.new(), "6m") as small:
        out = Path(shutil.copytree(scene.copy(), small / "run"))
        filler, training = small / "filler", scene.start(out)
        until(training, lambda: "resumed after step" in training.output)
        with filler.open("wb") as file:
            file.write(bytes(max(0, shutil.disk_usage(small).free - 40_000)))
        found = scene.ended(training, "cannot be written, and training goes on without it")
        filler.unlink()
        return found + (scene.goes_on(out) if checkpoints(out) else ["no checkpoint is left"])


def read_only(scene: Scene) -> list[str]:
    """A disk that cannot be written: a sentence."""
    with disk(scene.new(), "8m") as fixed:
        out = Path(shutil.copytree(scene.copy(), fixed / "run"))
        subprocess.run(["mount", "-o", "remount,ro", str(fixed)], check=True)
        return scene.refused(["--resume", str(out)], str(out), "Read-only file system")


@contextmanager
def disk(path: Path, size: str) -> Generator[Path]:
    """A small disk of its own."""
    if os.geteuid() != 0:
        raise NotRun("a disk is mounted, which takes root")
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def clock_in_a_run(scene: Scene) -> list[str]:
    """The clock is set back by a day while a run saves every second."""
    clock, out = scene.new(), scene.new()
    training = scene.start(out, "--save-every", "1s", variables=set_by(clock) | {"NO_FAKE_STAT": "1"})
    halfway(training)
    before = len(checkpoints(out))
    clock.write_text("-1d\n")
    found = scene.ended(training, whole=True) + how_it_ended(scene, out)
    return found + ["it has not saved any more"] * (len(checkpoints(out)) <= min(before, 1))


def clock_in_a_start(scene: Scene) -> list[str]:
    """The clock is set back by a day while a run starts that goes on."""
    clock, out = scene.new(), scene.copy()
    training = scene.start(out, variables=set_by(clock))
    until(training, training.ranks)
    clock.write_text("-1d\n")
    return scene.ended(training, whole=True) + how_it_ended(scene, out)


def how_it_ended(scene: Scene, out: Path) -> list[str]:
    """Whether a run's record says that it has finished."""
    ended = json.loads((out / "run.json").read_text()).get("ended", {})
    scene.line = f"run.json: ended {ended.get('how')} at {ended.get('at')}"
    return ["its record does not say how it ended"] * (ended.get("how") != "finished")


def set_by(clock: Path) -> dict[str, str]:
    """Variables by which a file sets the clock that processes see, but no timer."""
    clock.write_text("+0\n")
    return {
        "LD_PRELOAD": str(faketime()),
        "FAKETIME_TIMESTAMP_FILE": str(clock),
        "FAKETIME_NO_CACHE": "1",
        "DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }


def faketime() -> Path:
    """The library of libfaketime, of Debian's package or of Python's."""
    found = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))
    if spec := importlib.util.find_spec("libfaketime"):
        found += sorted(Path(spec.origin or "").parent.rglob("libfaketime.so.1"))
    if not found:
        raise NotRun("there is no libfaketime: apt install faketime, or pip install libfaketime")
    return found[0]


SURROUNDINGS = {
    "a disk that is full": disk_full,
    "a disk that is read-only": read_only,
    "the clock set back in a run": clock_in_a_run,
    "the clock set back in a start": clock_in_a_start,
}
