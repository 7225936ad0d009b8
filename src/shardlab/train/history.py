"""Folders of earlier runs: how far a run came, how it ended, and what it has saved.

`find_runs` reads folders for `shardlab history`; a `PastRun` has the content of one folder. `note_end` and
`remove_incomplete` change a folder: the first records the end of a run, the second removes what a killed run has left
incomplete. `lock_metrics` makes a folder belong to one process at a time. The last functions check that files can be
written before a run begins.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import Any, Literal, cast

from shardlab.common.files import PART_SUFFIX, missing_path, read_file, write_atomically
from shardlab.common.text import counted
from shardlab.language import UserError
from shardlab.models.named import weights_at
from shardlab.strategies.plan.plan import UNNAMED, Plan

CONFIG, METRICS, RECORD = "config.toml", "metrics.jsonl", "run.json"
WEIGHTS, AVERAGED = "weights.safetensors", "ema.safetensors"
"""Names of files in the folder of a run."""

CHECKPOINTS = "checkpoints"
"""Name of the folder, inside the folder of a run, that has its checkpoints."""

VALIDATION, VALIDATION_EMA = "validation_loss", "validation_loss_ema"
"""Names of validation losses in records: of the weights, and of their moving averages."""

WARNED = "warned by the scheduler (SIGUSR1)"
"""Reason of an interruption by a scheduler's warning. Job scripts look for this text."""

TAIL = 1 << 16
"""Number of bytes at the end of the metrics that certainly contain the whole last line."""

_UNFINISHED = re.compile(r"step-\d{6,}(\.old)?\.part")

End = Literal["finished", "interrupted", "failed"]


def record_inode(out: Path) -> int | None:
    """Return the inode of a run's record. Each start of a run writes a new file, so the inode tells starts apart."""
    with suppress(OSError):
        return (out / RECORD).stat().st_ino
    return None


def note_end(out: Path, end: End, old_inode: int | None, reason: str = "", validation: float | None = None) -> None:
    """Add to a run's record how it ended, unless the record is still the one from before this start.

    Args:
        out: folder of the run.
        end: how the run ended.
        old_inode: inode of the record before this start (`record_inode`).
        reason: reason, in one line.
        validation: validation loss of the weights that the run leaves.
    """
    path = out / RECORD
    with suppress(OSError, ValueError):  # the run has ended in any case
        if record_inode(out) == old_inode:
            return
        end_record = {"how": end, "at": datetime.now(UTC).isoformat(timespec="seconds"), "why": reason}
        end_record |= {} if validation is None else {VALIDATION: validation}
        write_atomically(path, json.dumps({**json.loads(path.read_text()), "ended": end_record}, indent=1) + "\n")


def has_finished(out: Path) -> bool:
    """Return whether a run came to its end and wrote its weights."""
    try:
        end = json.loads((out / RECORD).read_text())["ended"]["how"]
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return end == "finished" and weights_at(out / WEIGHTS) is not None


@dataclass(frozen=True)
class PastRun:
    """Content of a run's folder.

    Attributes:
        folder: the folder.
        record: content of run.json; empty if it cannot be read.
        steps: number of recorded optimizer steps.
        wanted: configured number of steps, if known.
        last: figures of the last recorded step, by name; empty if there is none.
        validation_loss: last recorded validation loss, of the end or of a step; None if there is none.
        ended: "finished", "interrupted", "failed", "running", "killed" (no end is recorded), or "unreadable".
        why: reason of the end in one line; may be empty.
        checkpoints: steps of the complete checkpoints, ascending.
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
        """Name of the strategy; for an unnamed plan, its mesh."""
        name, strategy = str(self.record.get("name", "")), self.record.get("strategy")
        if isinstance(strategy, dict) and name in ("", UNNAMED):
            with suppress(UserError, TypeError):  # written by another version
                return Plan.from_dict(cast(dict[str, Any], strategy)).title
        return name

    @property
    def resume(self) -> str | None:
        """Command that resumes the run; None if the run has finished, is running, or has no checkpoint."""
        if not self.checkpoints or self.ended in ("finished", "running"):
            return None
        return f"shardlab train --resume {self.folder}"

    def as_dict(self) -> dict[str, Any]:
        """Return the entries that --json prints."""
        return {**vars(self), "folder": str(self.folder), "strategy": self.strategy, "resume": self.resume}


def find_runs(folders: Sequence[Path]) -> list[PastRun]:
    """Read the runs in some folders, ordered by their beginning.

    Args:
        folders: folders of runs, or folders that contain folders of runs.

    Raises:
        UserError: if a folder does not exist.
    """
    runs: dict[Path, PastRun] = {}
    for folder in folders:
        if not folder.is_dir():
            raise missing_path(folder, "name the folder of a run, or one with runs in it")
        paths = [folder] if (folder / RECORD).exists() else sorted(path.parent for path in folder.glob(f"*/{RECORD}"))
        runs |= {path.resolve(): read_run(path) for path in paths}
    return sorted(runs.values(), key=lambda run: str(run.record.get("began", "")))


def read_run(folder: Path) -> PastRun:
    """Read a run's folder.

    Raises:
        UserError: if it is not the folder of a run.
    """
    if not (folder / RECORD).is_file():
        if not folder.exists():
            raise missing_path(folder, "name the folder of a run")
        raise UserError(f"{folder} is not the folder of a run: it has no {RECORD}")
    try:
        record = dict(read_file(folder / RECORD, "JSON"))
        end_record = dict(record.get("ended") or {})
    except UserError as error:
        record, end_record = {}, {"how": "unreadable", "why": str(error)}
    except (TypeError, ValueError):
        record, end_record = {}, {"how": "unreadable", "why": f"{folder / RECORD} is not the record of a run"}
    last = last_figures(folder / METRICS)
    steps = int(last["step"] or 0) + 1 if "step" in last else 0
    total = _configured_steps(folder)
    end = end_record.get("how") or _guess_end(folder, total is not None and steps >= total)
    last_validation: Any = end_record.get(VALIDATION)
    if not isinstance(last_validation, float):
        losses = (record.get(VALIDATION) for record in reversed(read_records(folder)))
        last_validation = next((loss for loss in losses if loss is not None), None)
    return PastRun(
        folder, record, steps, total, last, last_validation, end, end_record.get("why", ""), checkpoints_in(folder)
    )


def runs_beside(folder: Path) -> list[Path]:
    """Return the folders of all other runs in the parent folder of a run, the newest first."""
    records = (folder / ".." if folder.name in ("", "..") else folder.parent).glob(f"*/{RECORD}")
    newest = sorted(records, key=lambda path: path.stat().st_mtime, reverse=True)
    return [path.parent for path in newest if not path.parent.samefile(folder)]


def starting_folder(folder: Path) -> str | None:
    """Return the working directory in which a run began; None if its record does not say it."""
    working_folder = read_run(folder).record.get("folder") if (folder / RECORD).is_file() else None
    return working_folder if isinstance(working_folder, str) else None


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Return a run's records of steps, up to the first line that is incomplete."""
    records: list[dict[str, Any]] = []
    with suppress(OSError, ValueError):  # the last line may be incomplete
        for line in (folder / METRICS).read_text(encoding="utf-8").splitlines():
            records.append(json.loads(line))
    return records


def remove_incomplete(out: Path) -> None:
    """Remove the incomplete files and checkpoints that a killed run has left, and nothing that others put there."""
    for part in out.glob(f"*{PART_SUFFIX}"):
        part.unlink(missing_ok=True)
    for part in (out / CHECKPOINTS).glob("*"):
        if _UNFINISHED.fullmatch(part.name):
            shutil.rmtree(part, ignore_errors=True)


def checkpoints_in(out: Path) -> list[int]:
    """Return the steps of a run's complete checkpoints, ascending."""
    numbers = (path.parent.name.removeprefix("step-") for path in (out / CHECKPOINTS).glob("step-*/manifest.json"))
    return sorted(int(number) for number in numbers if number.isdecimal())


def last_figures(path: Path) -> dict[str, float | None]:
    """Return the last complete line of a run's metrics; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
            lines = file.read().splitlines()
    except OSError:
        return {}
    for line in reversed(lines):
        with suppress(ValueError):  # the last one may be incomplete
            return json.loads(line)
    return {}


def describe_saved(out: Path) -> str:
    """Return a sentence on what an output folder has: weights or figures, and the command that resumes the run."""
    steps = checkpoints_in(out)
    command = f"; go on after step {steps[-1]} with: shardlab train --resume {out}" if steps else ""
    return _describe_weights(out) + command


def lock_metrics(folder: Path) -> FileIO:
    """Open and lock a run's metrics for appending, until the file is closed or this process ends.

    The lock makes the folder belong to one process at a time.

    Raises:
        OSError: if the file cannot be opened.
        UserError: if another process has locked it.
    """
    file, deadline = FileIO(folder / METRICS, "ab"), time.monotonic() + ENDING_SECONDS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                file.close()
                problem = f"{folder} is in use by another process"
                raise UserError(f"{problem}; wait until it has ended, or end it first") from None
            time.sleep(0.05)
            continue
        except OSError:  # a file system without locks
            pass
        return file


ENDING_SECONDS = 2.0
"""Seconds for which a locked folder is awaited. A killed process keeps its lock until it has ended."""


def require_free(folder: Path) -> None:
    """Check that no other process is at work in a folder.

    Raises:
        UserError: if one is.
    """
    if (folder / METRICS).is_file():
        with suppress(OSError):
            lock_metrics(folder).close()


@contextmanager
def writing(path: Path) -> Generator[Path, None, None]:
    """Convert an OSError in the context, which writes `path`, to a message for the user.

    Raises:
        UserError: with the path and the reason, if it cannot be written.
    """
    try:
        yield path
    except OSError as error:
        raise UserError(
            f"{path} cannot be written ({error.strerror or error}); free some space, or name a folder on another disk "
            "with --out"
        ) from error


def require_writable(folder: Path) -> None:
    """Check that a run's folder can be made and written into, before any rank starts.

    Raises:
        UserError: with the reason, if it cannot.
    """
    try:
        existing_folder = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".shardlab-", dir=existing_folder))
    except OSError as error:
        raise UserError(
            f"--out {folder}: nothing can be written there ({error.strerror}); name another folder, one of your own"
        ) from error


def free_folder(parent: Path, name: str) -> Path:
    """Return `parent/name-N` with the smallest number N >= 1 for which no file exists yet."""
    number = 1
    while os.path.exists(parent / f"{name}-{number}"):  # false instead of an error if permission is denied
        number += 1
    return parent / f"{name}-{number}"


def _guess_end(folder: Path, complete: bool) -> str:
    """Infer how a run ended, or that it still runs, if its record does not say it.

    Args:
        folder: folder of the run.
        complete: whether all its steps are recorded.
    """
    if _in_use(folder / METRICS):
        return "running"
    return "finished" if complete and weights_at(folder / WEIGHTS) else "killed"


def _configured_steps(folder: Path) -> int | None:
    try:
        return int(read_file(folder / CONFIG, "TOML")["train"]["steps"])
    except (UserError, KeyError, TypeError, ValueError):
        return None


def _in_use(path: Path) -> bool:
    """Return whether a process has locked a run's metrics. The process that writes them locks them."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def _describe_weights(out: Path) -> str:
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
    """Return when a run began or was last resumed, in seconds since 1970; 0 if its record does not say it."""
    try:
        return datetime.fromisoformat(json.loads((out / RECORD).read_text())["began"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0
