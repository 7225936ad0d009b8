"""Where figures go beside metrics.jsonl: TensorBoard, and Weights & Biases; they are imported when asked for."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# wandb and tensorboard leave some of their annotations out.

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardlab.program import UserError
from shardlab.train.config import LoggingConfig

_START = re.compile(r"(?:offline-)?run-(\d+_\d+)-(.+?)(?:-\d+)?")
"""Name of the folder that wandb keeps of a start: its date and time, and the id of the run."""


class Logger(Protocol):
    """Takes a run's figures."""

    def log(self, metrics: Mapping[str, float | None]) -> None:
        """A step's figures; None is one that is not known, or not finite."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir`.

    Args:
        folder: the run's.
        since: the step at which it goes on, if it does: TensorBoard drops what it has of this step and later ones.
    """

    def __init__(self, folder: Path, since: int | None = None) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder / "tensorboard"), purge_step=since)

    def log(self, metrics: Mapping[str, float | None]) -> None:
        for name, figure in numbers(metrics).items():
            self._writer.add_scalar(name, figure, int(metrics["step"] or 0))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, under its own environment variables: WANDB_MODE=offline sends nothing.

    Args:
        folder: the run's, in which wandb keeps a folder of each start, named by the id of the run there.
        record: its settings.
        since: the step at which it goes on, if it does; its history there goes on as well.
        rewinds: whether that step or later ones were logged before. That history is cut off there.
    """

    def __init__(
        self, folder: Path, record: Mapping[str, Any], since: int | None = None, *, rewinds: bool = False
    ) -> None:
        import wandb

        starts = sorted(found.groups() for path in folder.glob("wandb/*") if (found := _START.fullmatch(path.name)))
        again: dict[str, Any] = {}
        if starts and since and rewinds:
            again = {"resume_from": f"{starts[-1][1]}?_step={since - 1}"}
        elif starts and since:
            again = {"id": starts[-1][1], "resume": "allow"}
        try:
            self._run = wandb.init(project="shardlab", name=folder.name, dir=str(folder), config=dict(record), **again)
        except wandb.Error as error:
            raise UserError(f"--wandb: {error}; log in with wandb login, or set WANDB_MODE=offline") from error

    def log(self, metrics: Mapping[str, float | None]) -> None:
        self._run.log(numbers(metrics), step=int(metrics["step"] or 0))

    def close(self) -> None:
        self._run.finish()


def loggers_of(
    config: LoggingConfig,
    folder: Path,
    record: Mapping[str, Any],
    since: int | None = None,
    *,
    rewinds: bool = False,
) -> list[Logger]:
    """Open what is asked for.

    Args:
        folder: the run's.
        record: its settings.
        since: the step at which it goes on, if it does.
        rewinds: whether that step or later ones were logged before.
    """
    loggers: list[Logger] = [TensorBoard(folder, since)] if config.tensorboard else []
    return [*loggers, WeightsAndBiases(folder, record, since, rewinds=rewinds)] if config.wandb else loggers


def require_loggers(config: LoggingConfig) -> None:
    """See that the packages are there, before anything is started.

    Raises:
        UserError: when one is missing.
    """
    for name, asked in (("tensorboard", config.tensorboard), ("wandb", config.wandb)):
        if asked and find_spec(name) is None:
            raise UserError(f"--{name} needs the package {name}, which is missing: pip install {name}")


def numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Figures that are known, without the step's number."""
    return {name: figure for name, figure in metrics.items() if figure is not None and name != "step"}
