"""Training run: its settings, its record, and its results.

`TrainingRun` has the settings that the command passes to the ranks, pickled. `Summary` is the result that rank 0
returns.
"""

# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# cloudpickle leaves its annotations out.

from __future__ import annotations

import pickle
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.check import Checked
from shardlab.common.text import counted
from shardlab.train.config import TrainingConfig
from shardlab.train.data import Corpus, parse_sources
from shardlab.train.data.prepared_folder import find_tokenizer, require_tokenizer, tokenizer_record
from shardlab.train.data.tokenizers import Tokenizer
from shardlab.train.job import Job, Tracing, job_as_dict

if TYPE_CHECKING:
    from shardlab.train.world import RunningWorld


WARM_UP = 3
"""Number of first steps that are left out of a run's speed, since they allocate memory and open connections."""


class ByValue:
    """Objects that are pickled together with their classes and functions.

    The ranks can then load objects whose classes are defined in a script or a notebook.

    Args:
        values: the objects.
    """

    def __init__(self, values: Sequence[Any] = ()) -> None:
        self.values = values

    def __reduce__(self) -> tuple[Callable[[bytes], ByValue], tuple[bytes]]:
        if not self.values:
            return _by_value, (b"",)
        import cloudpickle

        return _by_value, (cloudpickle.dumps(self.values),)


@dataclass(frozen=True)
class TrainingRun:
    """Settings of a training run.

    Attributes:
        config: configuration from which the run can be repeated.
        out: output folder. It does not exist yet, unless `continues` is true.
        command: command line that started the run (None: Python code did).
        tracing: steps that are recorded if the run is traced.
        peak: FLOP/s of all devices together (None: not known).
        resume: checkpoint from which the run is resumed (None: it begins anew).
        continues: whether the output folder exists already. Its records of steps that are run again are cut off.
        callbacks: the user's observers (`shardlab.train.steps.Callback`), besides those of every training.
    """

    config: TrainingConfig
    out: Path
    command: str | None = None
    tracing: Tracing = field(default_factory=Tracing)
    peak: float | None = None
    resume: Path | None = None
    continues: bool = False
    callbacks: ByValue = field(default_factory=ByValue)

    @cached_property
    def job(self) -> Job:
        """The strategy, the model and the shape of a step."""
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
            config.optimizer.optimizer,
            config.optimizer.ema,
            plan.passes,
        )

    def is_due(self, interval: int | None, step: int) -> bool:
        """Return whether an action that runs every `interval` steps is due after a step. After the last step, none is.

        Args:
            interval: number of steps between two actions; None for an action that is never due.
            step: number of the step, counted from 0.
        """
        finished_steps = step + 1
        return interval is not None and finished_steps % interval == 0 and finished_steps < self.config.train.steps

    def logs(self, step: int) -> bool:
        """Return whether a step is recorded: the first, the last, every N-th, and each with a validation or sample."""
        logging = self.config.logging
        due = any(self.is_due(interval, step) for interval in (logging.validate_every, logging.sample_every))
        return due or step + 1 in (1, self.config.train.steps) or (step + 1) % logging.log_every == 0

    def corpus(self, *, verify: bool = False) -> Corpus:
        """Open the training and validation data.

        Args:
            verify: compare the checksums of prepared folders, unless they are large.

        Raises:
            UserError: if the data cannot be read, are damaged or too short, or have tokens outside the model's
                vocabulary.
        """
        init, sources = self.config.train.init, parse_sources(self.config.data.data)
        tokenizer = self._tokenizer(all(source.path.is_dir() for source in sources) and bool(sources))
        corpus = Corpus.open(
            sources, self.job.model.seq_len, tokenizer=tokenizer, owner=str(init or self.out), verify=verify
        )
        corpus.require_vocabulary(self.job.model.vocab_size, None if init is None else str(init))
        return corpus

    def record(self, corpus: Corpus, checked: Checked, world: RunningWorld) -> dict[str, Any]:
        """Return the content of run.json: command, configuration, data, versions and ranks."""
        return {
            "command": self.command,
            "folder": str(Path.cwd()),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            **job_as_dict(self.job),
            "program": checked.program.fingerprint(),
            "batch_ramp": self.config.train.batch_ramp,
            "optimizer_settings": asdict(self.config.optimizer),
            "prompt": self.config.logging.prompt,
            "resumed": None if self.resume is None else str(self.resume),
            "init": None if self.config.train.init is None else str(self.config.train.init.absolute()),
            "data": corpus.record(),
            "tokenizer": tokenizer_record(corpus.tokenizer),
            "platform": platform.platform(),
            **asdict(world),
        }

    def _tokenizer(self, prepared: bool) -> Tokenizer | None:
        """Return the tokenizer of the weights with which the run starts; None if they are random or have no tokenizer.

        Args:
            prepared: whether all data are prepared folders, which have a tokenizer of their own.

        Raises:
            UserError: if weights in Hugging Face's format have no tokenizer, and the data need one.
        """
        init = self.config.train.init
        if self.continues and (tokenizer := find_tokenizer(self.out)) is not None:
            return tokenizer
        if init is None:
            return None
        return find_tokenizer(init) if prepared else require_tokenizer(init, self.job.model.vocab_size)


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Attributes:
        steps: optimizer steps taken; fewer than configured if the run was interrupted, or a callback stopped it.
        epochs: passes over each source of the data.
        interrupted, warned: whether the run was interrupted, and whether by a scheduler's warning.
        saved: step of the last checkpoint, if there is one.
        validation_before, validation_after: validation loss before and after the training, in nats per token.
        validation_after_ema: validation loss of the averaged weights, if there are any.
        warm_up: number of first steps that are left out of `dt`; with a batch ramp, all steps before the last stage.
        dt: median seconds of the other steps.
        tps: tokens per second of a step that takes `dt` seconds.
        seconds: duration of all steps since the run began or was resumed.
        prompt: text that the trained model continued.
        sample: the prompt and its continuation.
        out: output folder.
        unwritten: names of the files that could not be written into the folder.
    """

    steps: int
    epochs: tuple[float, ...]
    interrupted: bool
    warned: bool
    saved: int | None
    validation_before: float
    validation_after: float
    validation_after_ema: float | None
    warm_up: int
    dt: float
    tps: float
    seconds: float
    prompt: str
    sample: str
    out: str
    unwritten: list[str]

    def __repr__(self) -> str:
        steps = f"{counted(self.steps, 'step')}{', interrupted' if self.interrupted else ''}"
        loss = f"validation loss {self.validation_before:.3f} before, {self.validation_after:.3f} after"
        return f"<Summary of {steps}, {loss}, {self.tps:,.0f} tokens/s, in {self.out}>"


def _by_value(pickled: bytes) -> ByValue:
    return ByValue(pickle.loads(pickled) if pickled else ())
