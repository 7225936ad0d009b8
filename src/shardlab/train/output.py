"""The folder that a training run leaves behind."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# matplotlib leaves some of its annotations out.

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from shardlab.check import Checked
from shardlab.common.files import whole_file, write_whole
from shardlab.draw import save_timeline
from shardlab.language import UserError
from shardlab.simulate.timeline import simulate
from shardlab.train.config import LoggingConfig
from shardlab.train.data.tokenizers import Tokenizer
from shardlab.train.history import METRICS, VALIDATION, last_figures, locked, sweep, written
from shardlab.train.launch.interrupt import say
from shardlab.train.report import Logger, loggers_of


class OutputFolder:
    """run.json, config.toml, strategy.svg, loss.svg, and metrics.jsonl, a line a step; ranks add their weights.

    A file that cannot be written once training has begun is a sentence on stderr; the others are still written.
    """

    def __init__(self, path: Path, needed: int = 0, since: int | None = None) -> None:
        """Make the folder, for a run whose weights have `needed` bytes; or take it again, if a run is resumed.

        Args:
            since: the step that is resumed at: records of later ones go, and so do checkpoints that are not complete.

        Raises:
            UserError: when it exists, or cannot be made, or the weights would find no room; when it is to be taken
                again, and another process writes into it.
        """
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=since is not None)
        except FileExistsError:
            raise UserError(f"{path} exists; name a new folder with --out, so that nothing is overwritten") from None
        except OSError as error:
            raise UserError(f"the folder {path} cannot be made ({error.strerror}); name another with --out") from error
        if (free := shutil.disk_usage(path).free) < needed:
            if since is None:
                path.rmdir()
            raise UserError(
                f"the weights will have {needed:,} bytes, but the disk of {path} has {free:,} bytes free; "
                "free some, or name a folder on another disk with --out"
            )
        self._history: list[dict[str, Any]] = []
        self._rewinds = False
        with written(path / METRICS):
            self._metrics = locked(path)
            if since is not None:
                sweep(path)
                self._rewinds = int(last_figures(path / METRICS).get("step", -1) or 0) >= since
                self._history = _cut(self._metrics, path / METRICS, since)
        self._since = since
        self._pending = b""
        self.loggers: Sequence[Logger] = ()
        self._last: dict[str, Any] | None = None
        self._unwritten: set[str] = set()

    def abandon(self) -> None:
        """Take the folder away again, before anything was written into it, unless it is that of a resumed run."""
        self._metrics.close()
        if not self._history:
            with suppress(OSError):
                (self.path / METRICS).unlink()
                self.path.rmdir()

    @property
    def unwritten(self) -> list[str]:
        """Names of the files that could not be written."""
        return sorted(self._unwritten)

    @property
    def last_dt(self) -> float:
        """Seconds of the last step on record."""
        return self._history[-1]["dt"] if self._history else math.nan

    def begin(self, record: Mapping[str, Any], config: str, checked: Checked, name: str, tokenizer: Tokenizer) -> None:
        """Write what is known before the first step: the run's record, its configuration, a drawing of its program in
        unit costs, and the files of the data's tokenizer, if it has any.

        Raises:
            UserError: when they cannot be written.
        """
        with written(self.path / "run.json") as path:
            write_whole(path, json.dumps(record, indent=1) + "\n")
        with written(self.path / "config.toml") as path:
            write_whole(path, config)
        with written(self.path / "strategy.svg") as path:
            save_timeline(simulate(checked), path, f"{name}: one optimizer step")
        for file, content in tokenizer.files().items():
            with written(self.path / file) as path:
                path.write_bytes(content)

    def log(self, config: LoggingConfig, record: Mapping[str, Any]) -> None:
        """Log the records elsewhere as well, where that is asked for; a resumed run goes on with its own history."""
        self.loggers = loggers_of(config, self.path, record, self._since, rewinds=self._rewinds)

    def write_metrics(self, metrics: Mapping[str, float | None], *, pending: bool = False) -> None:
        """Append a step's figures; they are on disk when this returns, or are tried again with the next step's.

        A figure that is not finite becomes null, since JSON has no other word for it.

        Args:
            pending: write the figures only if no others come after them.
        """
        line = {name: figure if figure is None or math.isfinite(figure) else None for name, figure in metrics.items()}
        self._last = line
        if not pending:
            self._append()

    def _append(self) -> None:
        if self._last is not None:
            self._history.append(self._last)
            for logger in self.loggers:
                logger.log(self._last)
            self._pending += json.dumps(self._last, allow_nan=False).encode() + b"\n"
        self._last = None
        self._flush()

    def note_unwritten(self, names: Iterable[str]) -> None:
        """Note files that others could not write."""
        self._unwritten.update(names)

    def write_plot(self, before: float, after: Mapping[str, float]) -> None:
        """The training loss over the steps, with the validation losses at both ends; what is not finite is left out."""
        figure = Figure(figsize=(7, 4))
        FigureCanvasSVG(figure)
        axes = figure.add_axes((0.1, 0.12, 0.88, 0.85))  # a layout by what is drawn would draw it twice
        steps = [metrics["step"] for metrics in self._history]
        losses = [math.nan if metrics["loss"] is None else metrics["loss"] for metrics in self._history]
        axes.plot(steps, losses, linewidth=1.2, label="training")
        for name, loss in after.items():
            points = [(row["step"] + 1, row[name]) for row in self._history if row.get(name) is not None]
            points.append((steps[-1] + 1 if steps else 0, loss))
            first = [(0, before)] if name == VALIDATION else []
            label = "validation" if name == VALIDATION else "validation, averaged weights"
            axes.plot(*zip(*first, *points, strict=True), "o", label=label)
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.grid(alpha=0.3)
        axes.legend()
        with self._noted("loss.svg") as path, whole_file(path) as part:
            figure.savefig(part, format="svg")

    def close(self) -> None:
        """Write what is still pending of the metrics; of a line that finds no room nothing stays."""
        self._append()
        for logger in self.loggers:
            logger.close()
        self._metrics.close()
        if self._pending:
            path = self.path / METRICS
            os.truncate(path, path.read_bytes().rfind(b"\n") + 1)

    def _flush(self) -> None:
        with self._noted(METRICS):
            while self._pending:  # of a disk that is nearly full a write takes a part
                self._pending = self._pending[self._metrics.write(self._pending) :]

    @contextmanager
    def _noted(self, name: str) -> Generator[Path, None, None]:
        """Tell once, and note, that a file cannot be written."""
        path = self.path / name
        try:
            with written(path):
                yield path
            self._unwritten.discard(name)
        except UserError as error:
            if name not in self._unwritten:
                say(f"shardlab: {error}")
            self._unwritten.add(name)


def _cut(file: FileIO, path: Path, step: int) -> list[dict[str, Any]]:
    """Cut off the records of a step and later ones, and a line that a crash has torn; gives those that are left."""
    found: list[dict[str, Any]] = []
    end = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] >= step or not line.endswith(b"\n"):
            break
        found.append(record)
        end += len(line)
    file.truncate(end)
    return found
