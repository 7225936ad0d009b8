"""Output folder of a training run.

`OutputFolder` belongs to rank 0. It locks the folder, and writes run.json, config.toml, metrics.jsonl and strategy.svg.
`history.py` reads such folders.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from shardlab.check import Checked
from shardlab.common.files import write_atomically
from shardlab.draw import save_timeline
from shardlab.language import UserError
from shardlab.simulate.timeline import simulate
from shardlab.train.config import LoggingConfig
from shardlab.train.data.tokenizers import Tokenizer
from shardlab.train.history import METRICS, last_figures, lock_metrics, remove_incomplete, writing
from shardlab.train.launch.interrupt import say
from shardlab.train.report import Logger, open_loggers


class OutputFolder:
    """Folder with run.json, config.toml, strategy.svg, and metrics.jsonl (a line for each step).

    If a file cannot be written once training has begun, a sentence on stderr says so, and the other files are still
    written.

    Attributes:
        path: the folder.
        loggers: loggers that receive the metrics as well.
        unwritten: names of the files that could not be written.
    """

    def __init__(self, path: Path, needed: int = 0, step: int | None = None) -> None:
        """Make the folder, or open the folder of a run that is resumed.

        Args:
            path: the folder.
            needed: bytes that the weights of the run will take on the disk.
            step: step at which a run is resumed. Records of this and later steps are removed, and so are incomplete
                checkpoints. None for a new run.

        Raises:
            UserError: if the folder of a new run exists or cannot be made, if its disk is too full for the weights, or
                if another process writes into the folder of a resumed run.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=step is not None)
        except FileExistsError:
            raise UserError(f"{path} exists; name a new folder with --out, so that nothing is overwritten") from None
        except OSError as error:
            raise UserError(f"the folder {path} cannot be made ({error.strerror}); name another with --out") from error
        if (free := shutil.disk_usage(path).free) < needed:
            if step is None:
                path.rmdir()
            raise UserError(
                f"the weights will have {needed:,} bytes, but the disk of {path} has {free:,} bytes free; "
                "free some, or name a folder on another disk with --out"
            )
        self._history: list[dict[str, Any]] = []
        self._rewinds = False
        with writing(path / METRICS):
            self._metrics = lock_metrics(path)
            if step is not None:
                remove_incomplete(path)
                self._rewinds = int(last_figures(path / METRICS).get("step", -1) or 0) >= step
                self._history = _truncate(self._metrics, path / METRICS, step)
        self._resume_step = step
        self._pending = b""
        self.loggers: Sequence[Logger] = ()
        self._last: dict[str, Any] | None = None
        self.unwritten: set[str] = set()

    def abandon(self) -> None:
        """Remove the folder of a new run that has ended before its first record."""
        self._metrics.close()
        if not self._history:
            with suppress(OSError):
                (self.path / METRICS).unlink()
                self.path.rmdir()

    @property
    def last_dt(self) -> float:
        """Seconds of the last recorded step; NaN if there is none."""
        return self._history[-1]["dt"] if self._history else math.nan

    def begin(self, record: Mapping[str, Any], config: str, checked: Checked, name: str, tokenizer: Tokenizer) -> None:
        """Write the files that are complete before the first step.

        Args:
            record: content of run.json.
            config: content of config.toml.
            checked: program, which strategy.svg shows in teaching costs.
            name: name of the run in the drawing's title.
            tokenizer: tokenizer of the data, whose files are copied.

        Raises:
            UserError: if they cannot be written.
        """
        with writing(self.path / "run.json") as path:
            write_atomically(path, json.dumps(record, indent=1) + "\n")
        with writing(self.path / "config.toml") as path:
            write_atomically(path, config)
        with writing(self.path / "strategy.svg") as path:
            save_timeline(simulate(checked), path, f"{name}: one optimizer step")
        for file, content in tokenizer.files().items():
            with writing(self.path / file) as path:
                path.write_bytes(content)

    def log(self, config: LoggingConfig, record: Mapping[str, Any]) -> None:
        """Open the loggers that the configuration asks for. A resumed run continues its history in them."""
        self.loggers = open_loggers(config, self.path, record, self._resume_step, rewinds=self._rewinds)

    def write_metrics(self, metrics: Mapping[str, float | None], *, pending: bool = False) -> None:
        """Append the figures of a step to metrics.jsonl. If the disk is full, they are written with the next step's.

        A figure that is not finite becomes null, since JSON cannot express it.

        Args:
            metrics: figures of the step.
            pending: do not write the figures yet. `close` writes them, unless figures of another step follow.
        """
        line = {name: figure if figure is None or math.isfinite(figure) else None for name, figure in metrics.items()}
        self._last = line
        if not pending:
            self._append()

    def close(self) -> None:
        """Write the pending metrics, and close all files. A line that does not fit on the disk is removed whole."""
        self._append()
        for logger in self.loggers:
            logger.close()
        self._metrics.close()
        if self._pending:
            path = self.path / METRICS
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def _append(self) -> None:
        """Write the pending metrics. If that fails, print the error once, and keep the metrics for the next attempt."""
        if self._last is not None:
            self._history.append(self._last)
            for logger in self.loggers:
                logger.log(self._last)
            self._pending += json.dumps(self._last, allow_nan=False).encode() + b"\n"
        self._last = None
        try:
            with writing(self.path / METRICS):
                while self._pending:  # a disk that is nearly full may write a part
                    self._pending = self._pending[self._metrics.write(self._pending) :]
            self.unwritten.discard(METRICS)
        except UserError as error:
            if METRICS not in self.unwritten:
                say(f"shardlab: {error}")
            self.unwritten.add(METRICS)


def _truncate(file: FileIO, path: Path, step: int) -> list[dict[str, Any]]:
    """Remove the records of a step and later steps, and a line that a crash has cut off.

    Returns:
        The records that remain.
    """
    records: list[dict[str, Any]] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] >= step or not line.endswith(b"\n"):
            break
        records.append(record)
        end += len(line)
    file.truncate(end)
    return records
