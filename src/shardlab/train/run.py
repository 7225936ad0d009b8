"""A training run: what is asked for, what it is on record as, and what it came to."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from shardlab.check import Checked
from shardlab.execute import AdamW
from shardlab.train.checksum import RECORDED, checksum
from shardlab.train.data import Corpus, Text, default_text, map_text
from shardlab.train.described import described
from shardlab.train.job import Job
from shardlab.train.tracing import Tracing

VERSIONED = ("shardlab", "torch", "numpy", "safetensors")


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        job: what is trained.
        optimizer: AdamW's settings, with the number of steps.
        data: the text; None for the source of Python's standard library.
        out: the output folder, not there yet.
        tracing: how much of it is recorded (None: nothing).
        prompt: what the trained model goes on from, at least a byte (None: from the validation text).
        command: the command line that asked for it, if one did.
    """

    job: Job
    optimizer: AdamW
    data: Path | None
    out: Path
    tracing: Tracing | None = None
    prompt: str | None = None
    command: str | None = None

    def text(self) -> Text:
        """The text, as bytes.

        Raises:
            UserError: when it cannot be read.
        """
        return default_text() if self.data is None else map_text(self.data)

    def corpus(self, text: Text) -> Corpus:
        """The text in two parts.

        Raises:
            UserError: when it is shorter than two sequences.
        """
        source = "the default text" if self.data is None else str(self.data)
        return Corpus.split(text, self.job.model.seq_len, source)

    def record(self, text: Text, checked: Checked, device: str) -> dict[str, Any]:
        """All by which the run can be repeated, for a JSON file: command, configuration, data and versions."""
        source = "the source of Python's standard library" if self.data is None else str(self.data.absolute())
        return {
            "command": self.command,
            "folder": str(Path.cwd()),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            **described(self.job),
            "program": checked.program.fingerprint(),
            "optimizer": asdict(self.optimizer),
            "prompt": self.prompt,
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
