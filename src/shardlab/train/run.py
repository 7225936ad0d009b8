"""A training run: what is asked for, what it is on record as, and what it came to."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlab.check import Checked
from shardlab.train.checksum import RECORDED, checksum
from shardlab.train.config import TrainingConfig
from shardlab.train.data import Corpus, Text, default_text, map_text
from shardlab.train.described import described
from shardlab.train.job import Job
from shardlab.train.tracing import Tracing

VERSIONED = ("shardlab", "torch", "numpy", "safetensors")


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        config: all that it depends on.
        out: the output folder, not there yet.
        command: the command line that asked for it, if one did.
        tracing: how much of it is recorded, if it is to be traced.
    """

    config: TrainingConfig
    out: Path
    command: str | None = None
    tracing: Tracing = field(default_factory=Tracing)

    @cached_property
    def job(self) -> Job:
        """What is trained, and how."""
        config, plan = self.config, self.config.plan
        train = config.train
        return Job(
            plan.strategy,
            plan.ranks,
            train.microbatches,
            config.model,
            train.micro_batch_size,
            config.precision.precision,
            train.seed,
            plan.name,
        )

    def text(self) -> Text:
        """The text, as bytes.

        Raises:
            UserError: when it cannot be read.
        """
        data = self.config.data.data
        return default_text() if data is None else map_text(data)

    def corpus(self, text: Text) -> Corpus:
        """The text in two parts.

        Raises:
            UserError: when it is shorter than two sequences.
        """
        source = str(self.config.data.data or "the default text")
        return Corpus.split(text, self.config.model.seq_len, source)

    def record(self, text: Text, checked: Checked, device: str) -> dict[str, Any]:
        """All by which the run can be repeated, for a JSON file: command, configuration, data and versions."""
        source = (
            "the source of Python's standard library"
            if self.config.data.data is None
            else str(self.config.data.data.absolute())
        )
        return {
            "command": self.command,
            "folder": str(Path.cwd()),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            **described(self.job),
            "program": checked.program.fingerprint(),
            "optimizer": asdict(self.config.optimizer),
            "prompt": self.config.logging.prompt,
            "init": None if self.config.train.init is None else str(self.config.train.init.absolute()),
            "data": {"source": source, **asdict(checksum(text, RECORDED))},
            "device": device,
            "platform": platform.platform(),
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in VERSIONED}},
        }


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Attributes:
        steps: optimizer steps taken, fewer than asked for if the run was interrupted.
        interrupted: whether it was.
        validation_before, validation_after: loss on text that is not trained on, nats per token.
        tokens_per_second, ms_per_step: medians over the steps.
        prompt: what the trained model went on from.
        sample: the prompt, and the text with which the model went on.
        out: the output folder.
        unwritten: names of the files that could not be written into it.
    """

    steps: int
    interrupted: bool
    validation_before: float
    validation_after: float
    tokens_per_second: float
    ms_per_step: float
    prompt: str
    sample: str
    out: str
    unwritten: list[str]


def _version(package: str) -> str | None:
    """A package's version; None where it is run from a folder that nobody installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
