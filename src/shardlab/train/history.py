"""Runs of the past, read off their folders: what they were, how far they came, how they ended."""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.models.weight_files import weights_at
from shardlab.program import UserError
from shardlab.program.files import write_whole
from shardlab.program.nesting import read_file
from shardlab.strategies.plan import UNNAMED, Plan
from shardlab.train.saved import METRICS, RECORD, VALIDATION, WEIGHTS, checkpoints_in, last_figures

CONFIG = "config.toml"

WARNED = "warned by the scheduler (SIGUSR1)"
"""Why a run was interrupted, where it was told that its time is nearly over; its job script looks for this."""

End = Literal["finished", "interrupted", "failed"]


def record_in(out: Path) -> int | None:
    """Find which file is a run's record: each start writes a new one, and no clock has to tell which is newer."""
    with suppress(OSError):
        return (out / RECORD).stat().st_ino
    return None


def note_end(out: Path, how: End, before: int | None, why: str = "", validation: float | None = None) -> None:
    """Put on a run's record how it ended, if its folder is this process's: the record was written since.

    Args:
        before: the record before the run (`record_in`).
        why: a line.
        validation: the validation loss of the weights that the run leaves.
    """
    path = out / RECORD
    with suppress(OSError, ValueError):  # the run has ended in any case
        if record_in(out) == before:
            return
        ended = {"how": how, "at": datetime.now(UTC).isoformat(timespec="seconds"), "why": why}
        ended |= {} if validation is None else {VALIDATION: validation}
        write_whole(path, json.dumps({**json.loads(path.read_text()), "ended": ended}, indent=1) + "\n")


def has_finished(out: Path) -> bool:
    """Whether a run came to its end, and wrote its weights."""
    try:
        how = json.loads((out / RECORD).read_text())["ended"]["how"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return how == "finished" and weights_at(out / WEIGHTS) is not None


@dataclass(frozen=True)
class PastRun:
    """A run's folder.

    Attributes:
        folder: where it is.
        record: what stands in run.json; empty if that cannot be read.
        steps: optimizer steps on record.
        wanted: steps that were asked for, if that is known.
        last: the last figures on record.
        validation_loss: the last validation loss on record, of the end or of a step; None if there is none.
        ended: "finished", "interrupted", "failed", "running", "killed" (no end is on record), or "unreadable".
        why: a line on that, if there is more to say.
        checkpoints: steps of those that are complete, ascending.
    """

    folder: Path
    record: Mapping[str, Any]
    steps: int
    wanted: int | None
    last: Mapping[str, float | None]
    validation_loss: float | None
    ended: str
    why: str
    checkpoints: list[int]

    @property
    def strategy(self) -> str:
        """Name of the strategy; of a plan that was given none, its mesh."""
        name, strategy = str(self.record.get("name", "")), self.record.get("strategy")
        if isinstance(strategy, dict) and name in ("", UNNAMED):
            with suppress(UserError, TypeError):  # of another version
                return Plan.from_dict(cast(dict[str, Any], strategy)).title
        return name

    @property
    def resume(self) -> str | None:
        """The command that goes on with the run; None if it is over or running, or has no checkpoint."""
        if not self.checkpoints or self.ended in ("finished", "running"):
            return None
        return f"shardlab train --resume {self.folder}"

    def as_dict(self) -> dict[str, Any]:
        """What --json prints."""
        return {**vars(self), "folder": str(self.folder), "strategy": self.strategy, "resume": self.resume}


def past_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Find the runs in some folders, each a run's or one with runs in it, in the order in which they began.

    Raises:
        UserError: when there is no such folder.
    """
    found: dict[Path, PastRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise UserError(f"there is no folder {folder}; name one of a run, or one with runs in it")
        inside = [folder] if (folder / RECORD).exists() else sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
        found |= {path.resolve(): past_run(path) for path in inside}
    return sorted(found.values(), key=lambda run: str(run.record.get("began", "")))


def past_run(folder: Path) -> PastRun:
    """Read a run's folder.

    Raises:
        UserError: when there is none.
    """
    if not (folder / RECORD).is_file():
        raise UserError(f"{folder} is not the folder of a run: it has no {RECORD}")
    try:
        record = dict(read_file(folder / RECORD, "JSON"))
        ended = dict(record.get("ended") or {})
    except UserError as error:
        record, ended = {}, {"how": "unreadable", "why": str(error)}
    except (TypeError, ValueError):
        record, ended = {}, {"how": "unreadable", "why": f"{folder / RECORD} is not the record of a run"}
    last = last_figures(folder / METRICS)
    steps = int(last["step"] or 0) + 1 if "step" in last else 0
    wanted = _wanted(folder)
    how = ended.get("how") or _without_record(folder, wanted is not None and steps >= wanted)
    last_validation: Any = ended.get(VALIDATION)
    if not isinstance(last_validation, float):
        last_validation = _last_validation(folder)
    return PastRun(
        folder, record, steps, wanted, last, last_validation, how, ended.get("why", ""), checkpoints_in(folder)
    )


def records_of(folder: Path) -> list[dict[str, Any]]:
    """A run's records of steps, as far as they are whole."""
    found: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):  # the last line may be torn
        for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            found.append(json.loads(line))
    return found


def _last_validation(folder: Path) -> float | None:
    losses = [record.get(VALIDATION) for record in records_of(folder)]
    return next((loss for loss in reversed(losses) if loss is not None), None)


def _without_record(folder: Path, complete: bool) -> str:
    """How a run ended that did not say so."""
    if _in_use(folder / METRICS):
        return "running"
    return "finished" if complete and weights_at(folder / WEIGHTS) else "killed"


def _wanted(folder: Path) -> int | None:
    try:
        return int(read_file(folder / CONFIG, "TOML")["train"]["steps"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _in_use(path: Path) -> bool:
    """Whether a process has locked a run's metrics, as the one that writes them does."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False
