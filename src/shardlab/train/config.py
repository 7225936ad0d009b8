"""Configuration of a training run: one tree, from which the run can be repeated."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from shardlab.errors import UserError
from shardlab.models import Blocks
from shardlab.models.named import name_of
from shardlab.optimizers import OptimizerConfig
from shardlab.program.field_types import (
    AMOUNT,
    COUNT,
    DURATION,
    EVERY,
    FOLDER,
    INTEGER,
    SPAN,
    SWITCH,
    TEXTS,
    check_fields,
    choice,
    text,
)
from shardlab.program.toml import as_toml
from shardlab.strategies.plan import Plan
from shardlab.train.ramp import RAMP, BatchRamp

PrecisionName = Literal["fp32", "bf16", "bf16-fp32-grads", "fp16", "fp64"]
"""As in `shardlab.program.precision`."""

NonFinite = Literal["stop", "skip"]


@dataclass(frozen=True)
class DataConfig:
    """What is trained on."""

    data: Annotated[tuple[str, ...], TEXTS] = ()
    """Prepared folders (see shardlab data prepare), texts, or documents (.jsonl, .parquet), whose tokens are those of
    --init's tokenizer, or else bytes; of several, each is drawn from by its weight; none: the source of Python's
    standard library."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LoopConfig:
    """How much is trained."""

    steps: Annotated[int, COUNT] = 200
    """How many optimizer steps."""

    microbatches: Annotated[int, COUNT] = 4
    """How many microbatches the global batch is cut into; with a batch ramp, its last one."""

    micro_batch_size: Annotated[int, COUNT] = 4
    """Sequences of a microbatch."""

    seed: Annotated[int, INTEGER] = 0
    """Seed of weights, batches, dropout and the sample."""

    init: Annotated[Path | None, FOLDER] = None
    """Begin with the weights of a run, a checkpoint, or a folder in Hugging Face's form; without --model, its model is
    taken."""

    non_finite: Annotated[NonFinite, choice(NonFinite)] = "stop"
    """What follows a loss or a gradient that is not finite: the run stops, or leaves out the step and goes on, which
    takes a plan. In fp16 a step whose gradient overflows is left out in any case."""

    batch_ramp: Annotated[str | None, RAMP] = None
    """A batch that grows: from which step on it has how many microbatches, such as 0:4,200:8,1000:16."""

    compile: Annotated[bool, SWITCH] = False
    """Compile layers by torch.compile, each kind of layer once; the first step then takes long."""

    cuda_graph: Annotated[bool, SWITCH] = False
    """Capture a step as a CUDA graph, which the GPU repeats by itself: for small layers, whose kernels are shorter than
    the host takes to start them."""

    timeout: Annotated[float, DURATION] = 600.0
    """Time in which every rank gets on; if one does not, all end, and a report says who waits for whom. It is longer
    than any step, evaluation, sample or save: seconds, or 90s, 10m, 2h, 1:30:00."""

    audit_every: Annotated[int | None, COUNT] = None
    """Compare ranks after every so many steps: hashes of weights that several keep, and results of one microbatch that
    all compute; a rank that differs ends the run. It costs one or two steps."""

    def __post_init__(self) -> None:
        check_fields(self)
        if (last := self.ramp.stages[-1][1]) != self.microbatches:
            raise UserError(
                f"microbatches is {self.microbatches}, but the batch ramp {self.batch_ramp} ends with {last}; "
                "leave out one of them"
            )

    @property
    def ramp(self) -> BatchRamp:
        """How many microbatches each step has."""
        return BatchRamp.of(self.batch_ramp or f"0:{self.microbatches}")


@dataclass(frozen=True)
class PrecisionConfig:
    """The numbers that are computed with."""

    precision: Annotated[PrecisionName, choice(PrecisionName)] = "fp32"
    """Numbers of weights, activations and gradients; below 32 bits the optimizer keeps a copy of the weights in 32."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LoggingConfig:
    """What a run shows and records beside its metrics."""

    prompt: Annotated[str | None, text("TEXT", "some text, or leave it out for a line of the validation text")] = None
    """What the trained model goes on from; without it, a line of the text that it was not trained on."""

    log_every: Annotated[int, COUNT] = 1
    """A record and a line for every so many steps, and for the first and the last."""

    validate_every: Annotated[int | None, COUNT] = None
    """Validate after every so many steps, as before and after all of them."""

    sample_every: Annotated[int | None, COUNT] = None
    """Let the model go on from the prompt after every so many steps, as in the end."""

    tensorboard: Annotated[bool, SWITCH] = False
    """Write the records for TensorBoard as well, into the run's folder."""

    wandb: Annotated[bool, SWITCH] = False
    """Log the records to Weights & Biases as well; with WANDB_MODE=offline they stay in the run's folder."""

    profile_steps: Annotated[tuple[int, int] | None, SPAN] = None
    """Profile steps from the first number up to, but not including, the second, by torch.profiler: profile-RANK.json is
    for Perfetto."""

    memory_snapshot: Annotated[bool, SWITCH] = False
    """With --profile-steps: every allocation of these steps is in profile-RANK.json too; on a GPU memory-RANK.pickle
    has the allocator's blocks at their end, for pytorch.org/memory_viz."""

    price: Annotated[float | None, AMOUNT] = None
    """Price of a device for an hour; report.md tells what the run cost."""

    trace: Annotated[bool, SWITCH] = False
    """Record a few steps, every op's time and memory on every rank: trace.json is for Perfetto (ui.perfetto.dev) and
    Chrome, and shardlab compare FOLDER lays them beside the prediction."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class SavingConfig:
    """When a run is saved so that it can be resumed."""

    save_every: Annotated[int | str | None, EVERY] = None
    """Save a checkpoint after every so many steps (100), or after so much time (30s, 10m, 2h). Every run saves one
    after its last step, or when it is interrupted."""

    keep: Annotated[int, COUNT] = 2
    """How many checkpoints a run keeps."""

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class StrategyConfig:
    """How the model is laid over ranks.

    Attributes:
        strategy: a built-in name, path/to/file.py:function, or a plan.
        ranks: how many processes.
        name: what to call the strategy.
        passes: what rewrites its program, by name (None: what the plan says, or else nothing).
    """

    strategy: str | Plan
    ranks: int
    name: str
    passes: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """What stands in a file: the strategy's name and its passes, or all fields of the plan."""
        if isinstance(self.strategy, str):
            passes = {} if self.passes is None else {"passes": self.passes}
            return {"strategy": self.strategy, "ranks": self.ranks, **passes}
        plan = self.strategy
        whole = {each.name: getattr(plan, each.name) for each in fields(plan)}
        return {"name": self.name, **whole, **plan.as_dict()}


SECTIONS: dict[str, type[Any]] = {
    "data": DataConfig,
    "optimizer": OptimizerConfig,
    "train": LoopConfig,
    "precision": PrecisionConfig,
    "logging": LoggingConfig,
    "saving": SavingConfig,
}
"""Sections of the tree whose fields are flags of the same names; `model` and `plan` come on top."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """All that a training run depends on, apart from the machine and the versions.

    Attributes:
        model: what is trained.
        plan: how it is laid over ranks.
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
        """The tree as words, numbers and lists, section by section, as it would stand in a file; None stays."""
        model = {each.name: getattr(self.model, each.name) for each in fields(self.model)}
        sections = {"model": {"model": name_of(type(self.model)), **model}, "plan": self.plan.as_dict()}
        for name in SECTIONS:
            section = getattr(self, name)
            sections[name] = {each.name: getattr(section, each.name) for each in fields(section)}
        return {name: {key: as_words(value) for key, value in section.items()} for name, section in sections.items()}

    def as_toml(self) -> str:
        """The tree as a file; what follows by rule from other fields is a comment there, so that it still follows."""
        sections = self.as_dict()
        for name, default in ((each.name, each.default) for each in fields(self.model)):
            if default is not None and sections["model"][name] is None:
                sections["model"][name] = math.inf  # TOML has no word for none
        optimizer, steps = vars(self.optimizer), self.train.steps
        followed = ("schedule_steps", "warmup_steps", "decay_steps")
        chosen = {name: value for name, value in optimizer.items() if name not in followed}
        for name in followed:
            if optimizer[name] != by_rule(chosen, steps).get(name):
                chosen[name] = optimizer[name]
        sections["optimizer"] = {name: as_words(value) for name, value in chosen.items()}
        notes = [f"# {name} = {optimizer[name]} follows from steps" for name in followed if name not in chosen]
        return "\n".join(["# shardlab train --config FILE repeats the run", *notes, "", as_toml(sections)])


def by_rule(optimizer: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Fill in what follows from a run's steps, where nobody says: how the learning rate goes up and down.

    The schedule is as long as the run, and its warm-up a twentieth of that.
    """
    length = optimizer.get("schedule_steps", steps)
    filled = {"schedule_steps": length, "warmup_steps": -(-length // 20), **optimizer}
    if filled.get("learning_rate_schedule") == "constant":
        return filled
    return {"decay_steps": OptimizerConfig(**filled).decay, **filled}


def as_words(value: Any) -> Any:
    """A field's value as it stands in a file."""
    if isinstance(value, Path):
        return str(value)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
