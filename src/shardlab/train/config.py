"""Configuration of a training run: one tree that is enough to repeat the run.

`TrainingConfig` is the tree. Its sections are dataclasses whose fields are also command-line options and keys of a TOML
file; `--help` shows the docstrings of the fields. A file may also describe the batch and the cluster of a step
that is only simulated or planned (`BatchConfig`, `ClusterConfig`). `config_sources.py` merges presets, files and flags
into a tree. `BatchRamp` is a batch that grows during the run.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from shardlab.common.errors import UserError
from shardlab.common.fields import (
    AMOUNT,
    COUNT,
    DURATION,
    FOLDER,
    INTEGER,
    INTERVAL,
    SPAN,
    SWITCH,
    TEXTS,
    FieldType,
    check_fields,
    choice,
    text,
)
from shardlab.common.files import as_toml
from shardlab.common.text import counted
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language.precision import PRECISIONS, find_runnable_precision
from shardlab.models import Blocks
from shardlab.models.named import name_of
from shardlab.strategies.plan.plan import Plan

PRECISION = choice(cast(Any, Literal)[tuple(PRECISIONS)])
"""Type of the name of a precision."""

NonFinite = Literal["stop", "skip"]


@dataclass(frozen=True)
class DataConfig:
    """Training data."""

    data: Annotated[tuple[str, ...], TEXTS] = ()
    """Prepared folders, or text, .jsonl or .parquet files. Default: the source of Python's standard library."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LoopConfig:
    """Steps and batches of a run, and how they are computed."""

    steps: Annotated[int, COUNT] = 200
    """Number of optimizer steps."""

    microbatches: Annotated[int, COUNT] = 4
    """Number of microbatches in the global batch; with a batch ramp, in the last stage of the ramp."""

    micro_batch_size: Annotated[int, COUNT] = 4
    """Sequences per microbatch."""

    seed: Annotated[int, INTEGER] = 0
    """Seed of the weights, the batches, dropout and the samples."""

    init: Annotated[Path | None, FOLDER] = None
    """Initialize the weights from a run, a checkpoint or a Hugging Face folder. Without --model, its model is used as
    well."""

    non_finite: Annotated[NonFinite, choice(NonFinite)] = "stop"
    """Response to a loss or a gradient that is not finite: stop the run, or skip the step (needs fsdp or a plan). In
    fp16, a step whose gradient overflows is always skipped."""

    batch_ramp: Annotated[str | None, RAMP] = None
    """Increase the batch during the run: a list of STEP:MICROBATCHES, such as 0:4,200:8,1000:16."""

    compile: Annotated[bool, SWITCH] = False
    """Compile the layers with torch.compile, once for each kind of layer. The first step then takes long."""

    cuda_graph: Annotated[bool, SWITCH] = False
    """Capture a step as a CUDA graph and replay it. This helps with small layers, whose kernels run for less time than
    the host needs to launch them."""

    timeout: Annotated[float, DURATION] = 600.0
    """Stop the run if a rank makes no progress for this long, and report which rank waits for which. Choose more than
    the longest step, evaluation, sample or save: seconds, or 90s, 10m, 2h, 1:30:00."""

    audit_every: Annotated[int | None, COUNT] = None
    """Compare the ranks every N steps: hashes of replicated weights, and the results of one microbatch that all ranks
    compute. A difference stops the run. An audit takes as long as one or two steps."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (last := self.ramp.stages[-1][1]) != self.microbatches:
            raise UserError(
                f"microbatches is {self.microbatches}, but the batch ramp {self.batch_ramp} ends with {last}; "
                "leave out one of them"
            )

    @property
    def ramp(self) -> BatchRamp:
        """Number of microbatches of each step."""
        return BatchRamp.parse(self.batch_ramp or f"0:{self.microbatches}")


@dataclass(frozen=True)
class PrecisionConfig:
    """Data types of a run."""

    precision: Annotated[str, PRECISION] = "fp32"
    """Data types of weights and computations."""

    def __post_init__(self) -> None:
        check_fields(self)
        find_runnable_precision(self.precision)


@dataclass(frozen=True)
class LoggingConfig:
    """Logging, validation, samples and profiles of a run."""

    prompt: Annotated[str | None, text("TEXT", "some text, or leave it out for a line of the validation text")] = None
    """Text that the trained model continues. Default: a line of the validation text."""

    log_every: Annotated[int, COUNT] = 1
    """Log every N steps, and the first and the last step."""

    validate_every: Annotated[int | None, COUNT] = None
    """Validate every N steps, besides before the first and after the last step."""

    sample_every: Annotated[int | None, COUNT] = None
    """Continue the prompt every N steps, besides after the last step."""

    tensorboard: Annotated[bool, SWITCH] = False
    """Also write the metrics for TensorBoard, into the run's folder."""

    wandb: Annotated[bool, SWITCH] = False
    """Also log the metrics to Weights & Biases. With WANDB_MODE=offline they stay in the run's folder."""

    profile_steps: Annotated[tuple[int, int] | None, SPAN] = None
    """Profile the steps from FIRST up to, but not including, END with torch.profiler, into profile-RANK.json for
    Perfetto."""

    memory_snapshot: Annotated[bool, SWITCH] = False
    """With --profile-steps: also record every allocation in profile-RANK.json. On a GPU, memory-RANK.pickle shows the
    allocator's blocks after these steps, for pytorch.org/memory_viz."""

    price: Annotated[float | None, AMOUNT] = None
    """Price of one device per hour. report.md then states what the run cost."""

    trace: Annotated[bool, SWITCH] = False
    """Record the time and the memory of every op for a few steps. trace.json opens in Perfetto (ui.perfetto.dev) and
    Chrome, and shardlab compare FOLDER compares it with the prediction."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SavingConfig:
    """Checkpoints of a run."""

    save_every: Annotated[int | str | None, INTERVAL] = None
    """Save a checkpoint every N steps, or at intervals of time such as 30s, 10m or 2h. Every run also saves one after
    its last step, and when it is interrupted."""

    keep: Annotated[int, COUNT] = 2
    """Number of checkpoints that a run keeps."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class StrategyConfig:
    """Strategy of a run, and its number of ranks.

    Attributes:
        strategy: a built-in name, path/to/file.py:function, or a plan.
        ranks: number of processes.
        name: name of the strategy, for titles.
        passes: names of the passes that rewrite the program (None: those of the plan, or none).
    """

    strategy: str | Plan
    ranks: int
    name: str
    passes: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the section as it stands in a file: the strategy's name and its passes, or all fields of the plan."""
        if isinstance(self.strategy, str):
            passes = {} if self.passes is None else {"passes": self.passes}
            return {"strategy": self.strategy, "ranks": self.ranks, **passes}
        plan = self.strategy
        whole = {entry.name: getattr(plan, entry.name) for entry in fields(plan)}
        return {"name": self.name, **whole, **plan.as_dict()}


@dataclass(frozen=True)
class BatchConfig:
    """Global batch of a step, and its division into microbatches. None means that a value is not set.

    If no value is set, every plan gets the same batch, so that steps on one cluster can be compared.
    """

    global_batch: Annotated[int | None, COUNT] = None
    """Sequences in a step."""

    microbatches: Annotated[int | None, COUNT] = None
    """Number of microbatches in the global batch."""

    micro_batch_size: Annotated[int | None, COUNT] = None
    """Sequences of a microbatch."""

    def __post_init__(self) -> None:
        check_fields(self)

    def fill(self, other: BatchConfig) -> BatchConfig:
        """Return this batch, completed by values of another batch until two are set: they determine the third.

        >>> BatchConfig(microbatches=8).fill(BatchConfig(global_batch=64, micro_batch_size=4))
        BatchConfig(global_batch=64, microbatches=8, micro_batch_size=None)
        """
        values = {name: value for name, value in vars(self).items() if value is not None}
        for name in ("global_batch", "micro_batch_size", "microbatches"):
            if len(values) < 2 and (value := getattr(other, name)) is not None:
                values.setdefault(name, value)
        return BatchConfig(**values)

    def cut(self, devices: int, data_ranks: int | None) -> tuple[int, int]:
        """Divide the global batch into microbatches.

        The default is one microbatch of one sequence for each device of the cluster. It does not depend on the plan,
        so all commands for one cluster have steps with the same number of tokens.

        Args:
            devices: number of devices of the cluster, used or not.
            data_ranks: number of data-parallel ranks. They must divide the number of microbatches, unless it is set
                (None: the strategy is not a plan, and any number is accepted).

        Returns:
            The number of microbatches, and the number of sequences in each.

        Raises:
            UserError: if the values contradict each other, or the batch does not divide.
        """
        micro_batch_size, microbatches = self.micro_batch_size or 1, self.microbatches or devices
        if (total := self.global_batch) is not None:
            if self.micro_batch_size is None and self.microbatches is not None:
                micro_batch_size = max(1, total // self.microbatches)
            microbatches = self.microbatches or total // micro_batch_size
            if microbatches * micro_batch_size != total:
                count_text = counted(self.microbatches, "microbatch") if self.microbatches else "microbatches"
                size_text = f" of {counted(self.micro_batch_size, 'sequence')}" if self.micro_batch_size else ""
                multiple = f"give a multiple of {(self.microbatches or 1) * (self.micro_batch_size or 1)}"
                remedy = "leave out one of the three" if self.microbatches and self.micro_batch_size else multiple
                batch = counted(total, "sequence")
                raise UserError(f"a global batch of {batch} cannot be cut into {count_text}{size_text}; {remedy}")
        if self.microbatches is None and data_ranks is not None and microbatches % data_ranks:
            raise UserError(self._indivisible_text(microbatches, micro_batch_size, data_ranks, devices))
        return microbatches, micro_batch_size

    def _indivisible_text(self, microbatches: int, micro_batch_size: int, data_ranks: int, devices: int) -> str:
        reason = f" (a microbatch for each of the cluster's {devices:,} devices)" if self.global_batch is None else ""
        division = f", in microbatches of {micro_batch_size}," if micro_batch_size > 1 else ""
        down, unit = microbatches - microbatches % data_ranks, micro_batch_size * data_ranks
        sizes = f"{down * micro_batch_size} or {down * micro_batch_size + unit}" if down else f"{unit}"
        batch = counted(microbatches * micro_batch_size, "sequence")
        return (
            f"the global batch of {batch}{reason}{division} does not divide among "
            f"{data_ranks} data-parallel ranks; give --global-batch {sizes}"
        )


DIVISION = ("microbatches", "micro_batch_size")
"""Fields of a batch that are also fields of `train`."""


def _words(value: Any) -> str:
    fits = isinstance(value, Mapping) and all(isinstance(word, str) for word in cast(Mapping[str, Any], value).values())
    return "" if fits else 'a table of words in quotes, such as { attention = "flash2" }'


WORDS = FieldType(str, "NAME=VALUE ...", _words)
"""Type of a table of strings by name, such as the switches of a recipe."""


@dataclass(frozen=True)
class ClusterConfig:
    """Cluster on which a step is simulated or planned. None means that a value is not set."""

    cluster: Annotated[str | None, text("NAME", 'a cluster in quotes, such as "h100x16"')] = None
    """Name of the cluster."""

    recipe: Annotated[str | None, text("NAME", 'a recipe in quotes, such as "torchtitan"')] = None
    """Name of the recipe, which describes how a framework runs a step."""

    switches: Annotated[Mapping[str, str], WORDS] = field(default_factory=dict[str, str])
    """Values of the recipe's switches by name."""

    memory: Annotated[str | None, text("BYTES", 'a size in quotes, such as "72GiB"')] = None
    """Memory of each device that the step may use."""

    other_machine: Annotated[bool, SWITCH] = False
    """Accept a profile that was measured on another machine."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Everything that a training run depends on, apart from the machine and the versions.

    Attributes:
        model: model that is trained.
        plan: strategy that distributes the model over ranks.
        data, optimizer, train, precision, logging, saving: the other sections of a configuration file.
    """

    model: Blocks
    plan: StrategyConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: LoopConfig = field(default_factory=LoopConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    saving: SavingConfig = field(default_factory=SavingConfig)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Return the tree as strings, numbers and lists, section by section, as in a file. A value may be None."""
        model = {entry.name: getattr(self.model, entry.name) for entry in fields(self.model)}
        sections = {"model": {"model": name_of(type(self.model)), **model}, "plan": self.plan.as_dict()}
        sections |= {name: vars(getattr(self, name)) for name in SECTIONS}
        return {name: {key: _plain(value) for key, value in section.items()} for name, section in sections.items()}

    def as_toml(self) -> str:
        """Return the tree as the text of a TOML file.

        A learning-rate schedule that follows from the number of steps is a comment in the file, so that it still
        follows if the steps are changed there.
        """
        sections = self.as_dict()
        for name, default in ((entry.name, entry.default) for entry in fields(self.model)):
            if default is not None and sections["model"][name] is None:
                sections["model"][name] = math.inf  # TOML has no null
        optimizer, steps = vars(self.optimizer), self.train.steps
        derived = ("schedule_steps", "warmup_steps", "decay_steps")
        settings = {name: value for name, value in optimizer.items() if name not in derived}
        for name in derived:
            if optimizer[name] != with_default_schedule(settings, steps).get(name):
                settings[name] = optimizer[name]
        sections["optimizer"] = settings
        batch = {name: sections["train"].pop(name) for name in DIVISION}
        sections = {"model": sections.pop("model"), "plan": sections.pop("plan"), "batch": batch, **sections}
        notes = [f"# {name} = {optimizer[name]} follows from steps" for name in derived if name not in settings]
        return "\n".join(["# shardlab train --config FILE repeats the run", *notes, "", as_toml(sections)])


SECTIONS = {
    entry.name: cast(type[Any], entry.default_factory)
    for entry in fields(TrainingConfig)
    if entry.name not in ("model", "plan")
}
"""Sections of the tree whose fields are flags of the same names."""

JOB_SECTIONS = {**SECTIONS, "batch": BatchConfig, "cluster": ClusterConfig}
"""Sections of a file that describes a step. In a run's tree, the values of `batch` are part of `train`."""


def with_default_schedule(optimizer: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Return the settings of an optimizer, with the lengths of the learning-rate schedule filled in.

    By default the schedule is as long as the run, and its warm-up is a twentieth of that. A value in `optimizer`
    takes precedence.

    Args:
        optimizer: fields of `OptimizerConfig` that are set.
        steps: steps of the run.
    """
    length = optimizer.get("schedule_steps", steps)
    settings = {"schedule_steps": length, "warmup_steps": -(-length // 20), **optimizer}
    if settings.get("learning_rate_schedule") == "constant":
        return settings
    return {"decay_steps": OptimizerConfig(**settings).decay, **settings}


def _plain(value: Any) -> Any:
    """Return the value of a field as it stands in a file."""
    if isinstance(value, Path):
        return str(value)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class BatchRamp:
    """Number of microbatches of each step, in stages of constant size.

    >>> ramp = BatchRamp.parse("0:4,200:8")
    >>> ramp.microbatches(199), ramp.microbatches(200), ramp.microbatches_before(202), ramp.steps(816)
    (4, 8, 816, 202)

    Attributes:
        stages: (first step, microbatches of a step) of each stage, in ascending order; the first begins at step 0.
    """

    stages: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, text: str) -> BatchRamp:
        """Parse `STEP:MICROBATCHES,...`, such as `0:4,200:8`."""
        pairs = (stage.split(":") for stage in text.split(","))
        return cls(tuple((int(step), int(microbatches)) for step, microbatches in pairs))

    @property
    def counts(self) -> list[int]:
        """Numbers of microbatches that a step may have, each once."""
        return list(dict.fromkeys(microbatches for _, microbatches in self.stages))

    def stage(self, step: int) -> tuple[int, int]:
        """Return the stage to which a step belongs: the first step of the stage, and the microbatches of each step."""
        return self.stages[bisect_right(self.stages, step, key=lambda stage: stage[0]) - 1]

    def microbatches(self, step: int) -> int:
        """Return the number of microbatches of a step."""
        return self.stage(step)[1]

    def microbatches_before(self, step: int) -> int:
        """Return the number of microbatches of all steps before a step."""
        ends = [*(first for first, _ in self.stages[1:]), step]
        stages_and_ends = zip(self.stages, ends, strict=True)
        return sum(max(0, min(step, end) - first) * microbatches for (first, microbatches), end in stages_and_ends)

    def steps(self, microbatches: int) -> int:
        """Return the smallest number of steps that have at least this many microbatches in total."""
        starts = [first for first, _ in self.stages if self.microbatches_before(first) < microbatches] or [0]
        return starts[-1] - (self.microbatches_before(starts[-1]) - microbatches) // self.microbatches(starts[-1])


def _ramp_mistake(value: object) -> str:
    """Return the accepted form of a batch ramp if a value does not have it; empty if it has."""
    expected = "ascending steps from 0 on, each with its number of microbatches, such as 0:4,200:8"
    pairs = [stage.split(":") for stage in value.split(",")] if isinstance(value, str) else []
    if not pairs or any(len(pair) != 2 or not all(map(str.isdecimal, pair)) for pair in pairs):
        return expected
    steps = [int(step) for step, _ in pairs]
    ascending = steps[0] == 0 and all(first < second for first, second in pairwise(steps))
    return "" if ascending and all(int(microbatches) for _, microbatches in pairs) else expected


RAMP = FieldType(
    str,
    "STEP:N,...|none",
    lambda value: "" if value is None else _ramp_mistake(value),
    lambda words: None if words.lower() == "none" else words,
)
"""Type of an option that `BatchRamp.parse` reads. The text `none` means None."""
