"""Where figures go beside metrics.jsonl: TensorBoard, and Weights & Biases; they are imported when asked for."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# wandb and tensorboard leave some of their annotations out.

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from shardlab.program import UserError
from shardlab.train.config import LoggingConfig


class Logger(Protocol):
    """Takes a run's figures."""

    def log(self, metrics: Mapping[str, float | None]) -> None:
        """A step's figures; None is one that is not known, or not finite."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


class TensorBoard:
    """Event files in the run's folder, for `tensorboard --logdir`."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer

        self._writer: Any = Writer(str(folder / "tensorboard"))

    def log(self, metrics: Mapping[str, float | None]) -> None:
        for name, figure in numbers(metrics).items():
            self._writer.add_scalar(name, figure, int(metrics["step"] or 0))

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases, under its own environment variables: WANDB_MODE=offline sends nothing."""

    def __init__(self, folder: Path, record: Mapping[str, Any]) -> None:
        import wandb

        try:
            self._run = wandb.init(project="shardlab", name=folder.name, dir=str(folder), config=dict(record))
        except wandb.Error as error:
            raise UserError(f"--wandb: {error}; log in with wandb login, or set WANDB_MODE=offline") from error

    def log(self, metrics: Mapping[str, float | None]) -> None:
        self._run.log(numbers(metrics), step=int(metrics["step"] or 0))

    def close(self) -> None:
        self._run.finish()


def loggers_of(config: LoggingConfig, folder: Path, record: Mapping[str, Any]) -> list[Logger]:
    """Open what is asked for, for a run that is on record as `record`."""
    loggers: list[Logger] = [TensorBoard(folder)] if config.tensorboard else []
    return [*loggers, WeightsAndBiases(folder, record)] if config.wandb else loggers


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
