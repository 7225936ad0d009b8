"""Scenarios in which checkpoints are damaged or foreign: the file is named, the one before offered, and taken."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from tests.chaos.scene import DAMAGES, Damage, Scene, checkpoints, halfway, losses

KINDS = ("rank-0000.safetensors", "rank-0001.safetensors", "state.json", "config.toml", "manifest.json")
"""The files of a checkpoint by two ranks."""

PASSED_OVER = "trying the checkpoint before"


def newest(run: Path) -> Path:
    """A run's newest checkpoint."""
    return list(checkpoints(run).values())[-1]


def passed_over(scene: Scene, out: Path, *named: str) -> list[str]:
    """The newest checkpoint is refused by name, the one before is offered, and --resume auto takes that."""
    offered = f"the checkpoint before is whole: shardlab train --resume {out} --from-step"
    return scene.refused(["--resume", str(out)], *named, offered) + scene.goes_on(out, *named, PASSED_OVER)


def damaged(scene: Scene, damage: Damage, name: str) -> list[str]:
    """Damage to one file of the newest checkpoint."""
    out = scene.copy()
    damage(newest(out) / name, random.Random(name))
    return passed_over(scene, out, name)


def nothing_complete(scene: Scene) -> list[str]:
    """All checkpoints are damaged: a sentence, and nothing is overwritten."""
    out = scene.copy()
    for folder in checkpoints(out).values():
        (folder / "manifest.json").unlink()
    before = (out / "metrics.jsonl").read_bytes()
    found = scene.refused(["--resume", str(out)], "manifest.json", "there is no whole checkpoint before")
    found += scene.refused([*scene.words, "--out", str(out)], f"{out} has no checkpoint that can be read")
    return found + ["the metrics have changed"] * ((out / "metrics.jsonl").read_bytes() != before)


def another_model(scene: Scene) -> list[str]:
    """A checkpoint of another model lies among the run's own."""
    other, out = scene.new(), scene.copy()
    found = scene.ended(scene.start(other, "--hidden-size", "48", "--keep", "1"))
    place = newest(out)
    shutil.rmtree(place)
    shutil.copytree(newest(other), place)
    return [each for each in found if "differ" not in each] + passed_over(
        scene, out, "of another model: hidden_size is 48"
    )


def other_flags(scene: Scene) -> list[str]:
    """A run is to go on with another model."""
    return scene.refused(
        ["--resume", str(scene.copy()), "--hidden-size", "48"], "of another model: hidden_size is 32, not 48"
    )


def another_version(scene: Scene) -> list[str]:
    """A checkpoint of a format that is not known."""
    out = scene.copy()
    manifest = newest(out) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"version": 99}))
    return passed_over(scene, out, "was written in version 99 of the format")


def another_plan(scene: Scene) -> list[str]:
    """A checkpoint of another plan is dealt anew, and the run goes on equal to rounding."""
    out = scene.new()
    begun = scene.start(out, "--strategy", "1f1b")
    halfway(begun)
    begun.signal([begun.process.pid], signal.SIGTERM)
    begun.ended(60)
    training = scene.start(out)
    left = training.ended(60)
    found = [f"{len(left)} processes were left behind"] * bool(left)
    if training.process.returncode:
        return [f"it does not go on: {training.output[-400:]}"]
    ours, theirs = losses(out), losses(scene.reference)
    same = len(ours) == len(theirs) and all(abs(a[1] - b[1]) < 1e-4 for a, b in zip(ours, theirs, strict=True))
    return (
        found
        + ["its losses differ by more than rounding"] * (not same)
        + scene.heard(training.output, "resumed after step")
    )


def scenarios() -> dict[str, Callable[[Scene], list[str]]]:
    """All of them by name."""
    found: dict[str, Callable[[Scene], list[str]]] = {
        f"{kind}: {name}": partial(damaged, damage=damage, name=name)
        for kind, damage in DAMAGES.items()
        for name in KINDS
    }
    return found | {
        "no checkpoint is whole": nothing_complete,
        "a checkpoint of another model": another_model,
        "flags of another model": other_flags,
        "a checkpoint of another version": another_version,
        "a checkpoint of another plan": another_plan,
    }


BROKEN_FILES = scenarios()
