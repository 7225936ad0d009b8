"""Runs of the past, read off their folders: what they were, how far they came, how they ended."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.common.files import PART, read_file, write_whole
from shardlab.language import UserError
from shardlab.language.rules.kinds import counted
from shardlab.models.named import weights_at
from shardlab.strategies.plan.plan import UNNAMED, Plan

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


# Remains of a run that ended early, read off its files.


CHECKPOINTS = "checkpoints"
"""Name of the folder, in a run's, that has its checkpoints."""

WEIGHTS, AVERAGED = "weights.safetensors", "ema.safetensors"
METRICS, RECORD = "metrics.jsonl", "run.json"

VALIDATION, VALIDATION_EMA = "validation_loss", "validation_loss_ema"
"""Names of losses in records: of the weights, and of their averages."""

TAIL = 1 << 16
"""Bytes at the end of the metrics in which the last line is."""

_UNFINISHED = re.compile(r"step-\d{6,}(\.old)?\.part")


def sweep(out: Path) -> None:
    """Remove what a run's processes were writing when they were killed, and nothing that others have put there."""
    for part in out.glob(f"*{PART}"):
        part.unlink(missing_ok=True)
    for part in (out / CHECKPOINTS).glob("*"):
        if _UNFINISHED.fullmatch(part.name):
            shutil.rmtree(part, ignore_errors=True)


def checkpoints_in(out: Path) -> list[int]:
    """Steps of a run's complete checkpoints, ascending."""
    numbers = (path.parent.name.removeprefix("step-") for path in (out / CHECKPOINTS).glob("step-*/manifest.json"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def last_figures(path: Path) -> dict[str, float | None]:
    """The last whole line of a run's metrics; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # the last one may be torn
            return json.loads(line)
    return {}


def saved_in(out: Path) -> str:
    """A sentence on what there is in an output folder, and what is lost."""
    steps = checkpoints_in(out)
    again = f"; go on after step {steps[-1]} with: shardlab train --resume {out}" if steps else ""
    return _left(out) + again


def _left(out: Path) -> str:
    weights, metrics = weights_at(out / WEIGHTS), out / METRICS
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    if weights is not None:
        steps = counted(int(last_figures(metrics).get("step", -1) or 0) + 1, "step")
        if weights.stat().st_mtime < _began(out):
            return f"the weights in {weights} are from before the run was resumed; on record are {steps} ({METRICS})"
        return f"the weights after {steps} are in {weights}"
    if lines:
        return f"there are no weights in {out}, only the figures of {counted(len(lines), 'step')} ({METRICS})"
    return "no step had ended, so nothing is saved"


def _began(out: Path) -> float:
    """When a run began, or was resumed for the last time, in seconds since 1970; 0 where its record does not say."""
    try:
        return datetime.fromisoformat(json.loads((out / RECORD).read_text())["began"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


# A run's folder belongs to one process at a time: to the one that has locked its metrics.


def locked(folder: Path) -> FileIO:
    """Open a run's metrics to append to, which no other process can until the file is closed or this process ends.

    Raises:
        OSError: when it cannot be opened.
        UserError: when another process has it.
    """
    file = FileIO(folder / METRICS, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"{folder} is in use by another process; wait until that has ended, or end it first") from None
    except OSError:  # a file system that knows no locks
        pass
    return file


def require_free(folder: Path) -> None:
    """Refuse a folder that another process is at work in.

    Raises:
        UserError: if so.
    """
    if (folder / METRICS).is_file():
        with suppress(OSError):
            locked(folder).close()


# Where a run's files go, and that they can be written.


@contextmanager
def written(path: Path) -> Generator[Path, None, None]:
    """Make it the user's mistake that `path` cannot be written.

    Raises:
        UserError: with the path and the reason.
    """
    try:
        yield path
    except OSError as error:
        raise unwritable(path, error) from error


def unwritable(path: Path, error: OSError) -> UserError:
    """A sentence on a file that cannot be written."""
    return UserError(
        f"{path} cannot be written ({error.strerror or error}); free some space, or name a folder on another disk with "
        "--out"
    )


def require_writable(folder: Path) -> None:
    """Refuse the folder of a run that cannot be made, or written into if it is there, before ranks find that out.

    Raises:
        UserError: with the reason.
    """
    try:
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".shardlab-", dir=there))
    except OSError as error:
        raise UserError(
            f"--out {folder}: nothing can be written there ({error.strerror}); name another folder, one of your own"
        ) from error


def free_folder(parent: Path, name: str) -> Path:
    """`parent/name-1`, or the first number that is not taken."""
    number = 1
    while os.path.exists(parent / f"{name}-{number}"):  # also where it may not be looked at
        number += 1
    return parent / f"{name}-{number}"
