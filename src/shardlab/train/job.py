"""Job of a training run: a strategy, a model and the shape of a step; every process makes the same tapes of it."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any

from shardlab.check import Checked, check
from shardlab.common.user_code import bounded, file_and_name
from shardlab.language import Kind, Sizes, UserError, trace
from shardlab.language.pass_names import want_norm
from shardlab.language.precision import Optimizer, Precision, find_precision
from shardlab.models import Blocks, Model, cut_for
from shardlab.models.named import find_model, name_of, with_fields
from shardlab.simulate.passes import passed
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry


@dataclass(frozen=True)
class Job:
    """A strategy on a model.

    Attributes:
        strategy: a built-in name, path/to/file.py:function, or a plan.
        ranks: how many processes.
        microbatches: of the global batch.
        model: what is trained; its blocks are the program's layers (see `cut`).
        micro_batch_size: sequences of a microbatch.
        precision: in which numbers, by name (see `shardlab.language.precision`).
        seed: of weights, data and dropout.
        name: what to call the strategy (nothing: its own name).
        optimizer: what makes a step of a gradient, which says how large its state is.
        ema: decay of the average of weights that is part of that state (None: there is none).
        passes: what rewrites the program, by name (None: what the plan says, or else nothing); see `Plan.passes`.
    """

    strategy: str | Plan
    ranks: int
    microbatches: int
    model: Blocks
    micro_batch_size: int
    precision: str = "fp32"
    seed: int = 0
    name: str = ""
    optimizer: Optimizer = "adamw"
    ema: float | None = None
    passes: str | None = None

    @property
    def title(self) -> str:
        """Name of the strategy; of a plan that was given none, its mesh."""
        if isinstance(self.strategy, str):
            return self.name or self.strategy
        return self.strategy.title if self.name in ("", UNNAMED) else self.name

    @property
    def entry(self) -> StrategyEntry:
        """The strategy.

        Raises:
            UserError: when there is no such strategy or pass.
        """
        return load(self.strategy, self.passes)

    def checked(self) -> Checked:
        """The strategy traced for this job, checked, and rewritten by its passes, which unit costs guide.

        The job keeps the result, also when it is pickled: ranks that are started with the job do not trace again.

        Raises:
            Refused: when the program is wrong.
            UserError: when there is no such strategy, or sizes do not fit it.
        """
        return self._checked

    def keep(self, checked: Checked) -> None:
        """Keep the checked program that the caller has made of this job's strategy and passes."""
        self.__dict__["_checked"] = checked

    @cached_property
    def _checked(self) -> Checked:
        entry = self.entry
        unbounded = bounded(sys.maxsize, math.inf)  # whoever made the job has traced it within bounds
        with unbounded, contextlib.redirect_stdout(sys.stderr):  # stdout is the command's, whatever the program prints
            checked = check(trace(entry.program, entry.grid(self.ranks), self.sizes, self.microbatches))
        return passed(checked, entry.passes_on(self.ranks))

    @cached_property
    def cut(self) -> Model:
        """The model as the program's layers are: cut finer where the mesh, the plan, a tie or the pass `tile` says so.

        Raises:
            UserError: when the model does not divide.
        """
        entry = self.entry
        mesh, plan = entry.grid(self.ranks), entry.plan and entry.plan(self.ranks)
        tiles = entry.tiles_on(self.ranks)
        if plan is None:
            return cut_for(self.model, mesh, columns=entry.columns, tiles=tiles)
        apart, ulysses = plan.attention_apart, plan.ulysses
        return cut_for(self.model, mesh, planned=True, attention_apart=apart, ulysses=ulysses, tiles=tiles)

    @property
    def sizes(self) -> Sizes:
        """Elements of the program's values."""
        numbers, entry = self.numbers, self.entry
        elements = self.cut.sizes(self.micro_batch_size, numbers.bytes(Kind.ACTIVATION))
        clips = want_norm(entry.passes_on(self.ranks))
        sizes = numbers.sizes(elements, self.optimizer, ema=self.ema is not None, clips=clips)
        return entry.plan(self.ranks).counted(sizes) if entry.plan else sizes

    @property
    def numbers(self) -> Precision:
        """The dtypes of its values.

        Raises:
            UserError: when there is no such precision.
        """
        return find_precision(self.precision)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.micro_batch_size * self.model.seq_len


# A job in words and numbers, for a file, and the job again.


def job_as_dict(job: Job) -> dict[str, Any]:
    """Describe a job in words and numbers, from which `job_of` makes it again."""
    return {field.name: getattr(job, field.name) for field in fields(job)} | {
        "strategy": job.strategy if isinstance(job.strategy, str) else job.strategy.as_dict(),
        "model": {"kind": name_of(type(job.model)), **asdict(job.model)},
    }


def model_from_dict(words: Mapping[str, Any]) -> Blocks:
    """The model that was described, as that of a job."""
    changes = dict(words)
    kind = changes.pop("kind")
    return with_fields(find_model(kind), changes, kind)


def job_from_dict(words: Mapping[str, Any]) -> Job:
    """The job that was described.

    Raises:
        UserError: when this version of Shardlab has no such model, plan or precision, or a model's file is not here.
    """
    if (path := file_and_name(str(words.get("model", {}).get("kind")))[0]) is not None and not path.is_file():
        raise UserError(
            f"the model of this trace is in {path}, which is not here; give the command in the run's folder"
        )
    try:
        words = {"passes": None, **words}  # which a trace of an older version does not have
        strategy = words["strategy"]
        found: dict[str, Any] = {
            "strategy": strategy if isinstance(strategy, str) else Plan.from_dict(strategy),
            "model": model_from_dict(words["model"]),
        }
        return Job(**({field.name: words[field.name] for field in fields(Job)} | found))
    except (KeyError, AttributeError, TypeError, UserError) as error:
        raise UserError(
            f"the job in this trace is none that this version of Shardlab knows ({type(error).__name__}: {error}); "
            "compare it with the version that recorded it"
        ) from None


# Which of a run's steps are recorded.


@dataclass(frozen=True)
class Tracing:
    """How much of a run is recorded.

    Attributes:
        warm_up: steps before, in which memory is first taken and connections are made.
        timed: steps whose ops are timed; they start together on all ranks, as simulated steps do.
        measured: steps, after those, whose memory is measured; of these the last is kept.
    """

    warm_up: int = 3
    timed: int = 10
    measured: int = 2

    @property
    def steps(self) -> int:
        """How many steps a run must have."""
        return self.warm_up + self.timed + self.measured
