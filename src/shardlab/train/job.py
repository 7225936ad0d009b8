"""Job of a training run: a strategy, a model and the shape of a step.

Every process traces the same program from the same `Job`. `job_as_dict` and `job_from_dict` store a job in a file.
`Tracing` says which steps of a run are recorded for a trace.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Any, cast

from shardlab.check import Checked, check
from shardlab.common.user_code import file_and_name, file_from_here, trace_limits
from shardlab.language import Kind, Sizes, UserError, trace
from shardlab.language.pass_names import needs_norm
from shardlab.language.precision import Optimizer, Precision, find_runnable_precision
from shardlab.models import Blocks, Model, cut_for
from shardlab.models.named import find_model, name_of, with_fields
from shardlab.simulate.passes import apply_passes
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import UNNAMED, Plan
from shardlab.strategies.registry import StrategyEntry


@dataclass(frozen=True)
class Job:
    """A strategy applied to a model, with the shape of a step.

    Attributes:
        strategy: a built-in name, path/to/file.py:function, or a plan.
        ranks: number of processes.
        microbatches: microbatches of the global batch.
        model: model that is trained. `cut` divides it into the program's layers.
        micro_batch_size: sequences of a microbatch.
        precision: name of the precision (see `shardlab.language.precision`).
        seed: seed of weights, data and dropout.
        name: name of the strategy for titles; empty for the strategy's own name.
        optimizer: name of the optimizer, which determines the size of the optimizer state.
        ema: decay of the weights' moving average, which is part of the optimizer state (None: no average).
        passes: names of the passes that rewrite the program (None: those of the plan, or none); see `Plan.passes`.
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
        """Name of the strategy; for an unnamed plan, its mesh."""
        if isinstance(self.strategy, str):
            return self.name or self.strategy
        return self.strategy.title if self.name in ("", UNNAMED) else self.name

    @property
    def entry(self) -> StrategyEntry:
        """The strategy's entry in the catalogue, or one that is made for a plan or for a function in a file.

        Raises:
            UserError: if there is no such strategy or pass, or if its plan recomputes parts of blocks in a way that
                only predictions support.
        """
        entry = load(self.strategy, self.passes)
        if entry.plan is not None and (parts := entry.plan(self.ranks).recompute_inside):
            raise UserError(
                f"recompute {parts} is for predictions, with simulate and plan: ranks keep or recompute whole blocks "
                "or attention's scores; give --recompute none, selective, full, every-N, first-N or uniform-N"
            )
        return entry

    def checked(self) -> Checked:
        """Trace and check the strategy for this job, and rewrite the program by the job's passes.

        Passes are guided by a simulation with teaching costs (relative times, no cluster). The result is cached in
        the job and pickled with it, so that the ranks do not trace again.

        Raises:
            Refused: if the program is wrong.
            UserError: if there is no such strategy, or sizes do not fit it.
        """
        return self._checked

    def set_checked(self, checked: Checked) -> None:
        """Cache a checked program that the caller has made from this job's strategy and passes."""
        self.__dict__["_checked"] = checked

    @cached_property
    def cut(self) -> Model:
        """The model as the program's layers. The mesh, the plan, a tied head or the pass `tile` may split blocks.

        Raises:
            UserError: if the model cannot be split as the mesh or the plan requires.
        """
        entry = self.entry
        mesh, plan = entry.grid(self.ranks), entry.plan and entry.plan(self.ranks)
        tiles = entry.tiles_on(self.ranks)
        if plan is None:
            return cut_for(self.model, mesh, columns=entry.columns, tiles=tiles)
        attention_apart, ulysses = plan.attention_apart, plan.ulysses
        return cut_for(self.model, mesh, planned=True, attention_apart=attention_apart, ulysses=ulysses, tiles=tiles)

    @property
    def sizes(self) -> Sizes:
        """Number of elements of the program's values."""
        numbers, entry = self.numbers, self.entry
        elements = self.cut.sizes(self.micro_batch_size, numbers.bytes(Kind.ACTIVATION))
        clips = needs_norm(entry.passes_on(self.ranks))
        sizes = numbers.sizes(elements, self.optimizer, ema=self.ema is not None, clips=clips)
        return entry.plan(self.ranks).counted(sizes) if entry.plan else sizes

    @property
    def numbers(self) -> Precision:
        """Data types of the program's values.

        Raises:
            UserError: if there is no such precision, or it is for predictions alone.
        """
        return find_runnable_precision(self.precision)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.microbatches * self.micro_batch_size * self.model.seq_len

    @cached_property
    def _checked(self) -> Checked:
        entry = self.entry
        unbounded = trace_limits(sys.maxsize, math.inf)  # the command has already traced it within its limits
        with unbounded, contextlib.redirect_stdout(sys.stderr):  # stdout has the command's output only
            checked = check(trace(entry.program, entry.grid(self.ranks), self.sizes, self.microbatches))
        return apply_passes(checked, entry.passes_on(self.ranks))


def job_as_dict(job: Job) -> dict[str, Any]:
    """Return a job as strings and numbers for a JSON file, from which `job_from_dict` restores it."""
    return {field.name: getattr(job, field.name) for field in fields(job)} | {
        "strategy": job.strategy if isinstance(job.strategy, str) else job.strategy.as_dict(),
        "model": {"kind": name_of(type(job.model)), **asdict(job.model)},
    }


def job_from_dict(record: Mapping[str, Any], folder: str | None = None) -> Job:
    """Restore a job from the result of `job_as_dict`.

    Args:
        record: the job.
        folder: folder in which the run of the job began, for paths in the record (None: the working directory).

    Raises:
        UserError: if this version of Shardlab has no such model, plan or precision, or a model's file is missing.
    """
    record = _with_paths_from_here(record, folder)
    if (path := file_and_name(str(record.get("model", {}).get("kind")))[0]) is not None and not path.is_file():
        raise UserError(
            f"the model of this trace is in {path}, which is not here; give the command in the run's folder"
        )
    try:
        record = {"passes": None, **record}  # traces of older versions lack this field
        strategy, model = record["strategy"], dict(record["model"])
        kind = model.pop("kind")
        objects: dict[str, Any] = {
            "strategy": strategy if isinstance(strategy, str) else Plan.from_dict(strategy),
            "model": with_fields(find_model(kind), model, kind),
        }
        return Job(**({field.name: record[field.name] for field in fields(Job)} | objects))
    except (KeyError, AttributeError, TypeError, UserError) as error:
        raise UserError(
            f"this version of Shardlab cannot read the job in this trace ({type(error).__name__}: {error}); "
            "compare it with the version that recorded it"
        ) from None


def _with_paths_from_here(record: Mapping[str, Any], folder: str | None) -> Mapping[str, Any]:
    """Return the record of a job with the paths of its strategy, schedule and model converted from `folder` to here."""

    def from_here(name: Any) -> Any:
        return file_from_here(name, folder) if isinstance(name, str) else name

    paths = {"strategy": from_here(record.get("strategy"))}
    for name, field in (("strategy", "schedule"), ("model", "kind")):
        if isinstance(part := record.get(name), dict):
            paths[name] = {**part, field: from_here(cast(dict[str, Any], part).get(field))}
    return {**record, **paths}


@dataclass(frozen=True)
class Tracing:
    """Steps of a run that are recorded for a trace.

    Attributes:
        warm_up: number of steps before the first recorded one. They allocate memory and open connections.
        timed_steps: number of steps whose ops are timed. They start together on all ranks, as simulated steps do.
        measured_steps: number of steps after the timed ones whose memory is measured. The trace shows the last of them.
    """

    warm_up: int = 3
    timed_steps: int = 10
    measured_steps: int = 2

    @property
    def steps(self) -> int:
        """Number of steps that a run needs for the trace."""
        return self.warm_up + self.timed_steps + self.measured_steps
