"""A training run: what is asked for, what it is on record as, and what it came to."""

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
from shardlab.train.config import TrainingConfig
from shardlab.train.data import Corpus, sources_of
from shardlab.train.data.prepared_folder import described as described_tokenizer
from shardlab.train.data.prepared_folder import kept_tokenizer, want_tokenizer
from shardlab.train.data.tokenizers import Tokenizer
from shardlab.train.job import Job, Tracing, described

if TYPE_CHECKING:
    from shardlab.train.world import RunningWorld


WARM_UP = 3
"""First steps that a run's speed leaves out: memory is taken for the first time, and connections are made."""


class ByValue:
    """Objects that are pickled with their classes and functions, so that those of a script or notebook reach the ranks.

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


def _by_value(pickled: bytes) -> ByValue:
    return ByValue(pickle.loads(pickled) if pickled else ())


@dataclass(frozen=True)
class TrainingRun:
    """A training run.

    Attributes:
        config: all that it depends on.
        out: the output folder, not there yet unless the run is resumed.
        command: the command line that asked for it, if one did.
        tracing: how much of it is recorded, if it is to be traced.
        peak: FLOP/s of all its devices together, if that is known.
        resume: the checkpoint that it goes on from, if it does.
        again: whether the folder is there, and what is recorded of later steps is cut off.
        callbacks: observers beside those of every training (`shardlab.train.steps.Callback`).
    """

    config: TrainingConfig
    out: Path
    command: str | None = None
    tracing: Tracing = field(default_factory=Tracing)
    peak: float | None = None
    resume: Path | None = None
    again: bool = False
    callbacks: ByValue = field(default_factory=ByValue)

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
            config.optimizer.optimizer,
            config.optimizer.ema,
            plan.passes,
        )

    def is_due(self, every: int | None, step: int) -> bool:
        """Return whether something that is done after every so many steps is done after this one, but for the last."""
        done = step + 1
        return every is not None and done % every == 0 and done < self.config.train.steps

    def logs(self, step: int) -> bool:
        """Whether a step is put on record: every so many are, the first and the last, and those that are looked at."""
        logging = self.config.logging
        looks = any(self.is_due(every, step) for every in (logging.validate_every, logging.sample_every))
        return looks or step + 1 in (1, self.config.train.steps) or (step + 1) % logging.log_every == 0

    def corpus(self, *, verify: bool = False) -> Corpus:
        """The data in two parts.

        Args:
            verify: compare the checksums of prepared folders, unless they are large.

        Raises:
            UserError: when they cannot be read, are torn or too short, or have tokens that the model does not know.
        """
        init, sources = self.config.train.init, sources_of(self.config.data.data)
        tokenizer = self._tokenizer(all(source.path.is_dir() for source in sources) and bool(sources))
        corpus = Corpus.open(
            sources, self.job.model.seq_len, tokenizer=tokenizer, of=str(init or self.out), verify=verify
        )
        corpus.want_vocabulary(self.job.model.vocab_size, None if init is None else str(init))
        return corpus

    def _tokenizer(self, prepared: bool) -> Tokenizer | None:
        """The tokenizer of the weights that the run begins with, or goes on with; None: the data have their own.

        Args:
            prepared: whether all data are tokens already, so that weights need not have a tokenizer.

        Raises:
            UserError: when weights of Hugging Face's form come without one.
        """
        init = self.config.train.init
        if self.again and (found := kept_tokenizer(self.out)) is not None:
            return found
        if init is None:
            return None
        return kept_tokenizer(init) if prepared else want_tokenizer(init, self.job.model.vocab_size)

    def record(self, corpus: Corpus, checked: Checked, world: RunningWorld) -> dict[str, Any]:
        """All by which the run can be repeated, for a JSON file: command, configuration, data and versions."""
        return {
            "command": self.command,
            "folder": str(Path.cwd()),
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            **described(self.job),
            "program": checked.program.fingerprint(),
            "batch_ramp": self.config.train.batch_ramp,
            "optimizer_settings": asdict(self.config.optimizer),
            "prompt": self.config.logging.prompt,
            "resumed": None if self.resume is None else str(self.resume),
            "init": None if self.config.train.init is None else str(self.config.train.init.absolute()),
            "data": corpus.record(),
            "tokenizer": described_tokenizer(corpus.tokenizer),
            "platform": platform.platform(),
            **world.as_dict(),
        }


@dataclass(frozen=True)
class Summary:
    """Results of a run.

    Attributes:
        steps: optimizer steps taken, fewer than asked for if the run was interrupted.
        epochs: how often each source of the data was gone through.
        interrupted, warned: whether it was, and whether by a scheduler's warning.
        saved: the step of its last checkpoint, if it has one.
        validation_before, validation_after: loss on text that is not trained on, nats per token.
        validation_after_ema: that of the averaged weights, if there are any.
        warm_up: how many of the first steps the speeds leave out.
        dt, tps: median seconds of the other steps, and the tokens per second that follow.
        seconds: of all steps together.
        prompt: what the trained model went on from.
        sample: the prompt, and the text with which the model went on.
        out: the output folder.
        unwritten: names of the files that could not be written into it.
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
