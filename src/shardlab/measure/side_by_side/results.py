"""Results of a comparison in seconds and bytes, and the pairs that are compared.

A pair has two sides, ours and PyTorch's. The plain step, which computes a rank's share of the work without
communication, is timed as a third side. In each turn, every side runs one timed step. `Side` has the timed steps of one
side, `Comparison` those of a pair, and `as_json` returns the whole table. `PAIRS` lists our strategies with PyTorch's
counterpart, and `SIZES` the models.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple

from shardlab.common.errors import find_by_name
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language.pass_names import named_passes
from shardlab.measure.profile import this_machine
from shardlab.models import GPT
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job

LOSSES_AGREE = 1e-4
"""Largest relative difference at which losses count as equal."""


class Spread(NamedTuple):
    """Median of several figures, with the quartiles below and above it."""

    low: float
    median: float
    high: float


def spread_of(figures: Sequence[float]) -> Spread:
    """Return the quartiles of some figures. For a single figure, all three are equal to it."""
    return Spread(*(quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [*figures] * 3))


class Parts(NamedTuple):
    """Parts of the time of a typical step, in seconds.

    Attributes:
        compute: CPU time of a plain step's thread: kernels and autograd of plain PyTorch.
        overhead: CPU time of this side's thread beyond `compute`; negative if it is less.
        waiting: the rest of the step, in which the thread waits for another rank or for a core.
    """

    compute: float
    overhead: float
    waiting: float


@dataclass(frozen=True)
class Side:
    """Timed steps of one side.

    Attributes:
        seconds: seconds of each step on the slowest rank.
        computing: CPU seconds of the training thread in each step, the mean over ranks.
        peak: peak memory in bytes of the rank with the most.
    """

    seconds: list[float]
    computing: list[float]
    peak: int

    def parts(self, plain: Side) -> Parts:
        """Divide the median step into compute, overhead and waiting.

        Args:
            plain: timed plain steps (see `Comparison`).
        """
        step_seconds, thread_seconds, compute = median(self.seconds), median(self.computing), median(plain.computing)
        return Parts(compute, thread_seconds - compute, max(0.0, step_seconds - thread_seconds))


def ratios(side: Side, other: Side) -> Spread:
    """Return the quartiles of the ratios of two sides' steps. A slowdown of a whole turn cancels in its ratio."""
    return spread_of([a / b for a, b in zip(side.seconds, other.seconds, strict=True)])


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference between losses of the same step; NaN if one of them is NaN."""
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("nan")


@dataclass(frozen=True)
class Comparison:
    """Comparison of a pair.

    Attributes:
        ours, theirs: timed steps of both sides.
        plain: timed plain steps, which compute a rank's share of the work without communication.
        our_losses, their_losses: mean loss of every step, including warm-up.
        transport: transport of both sides: "shared", "gloo" or "nccl".
    """

    ours: Side
    theirs: Side
    plain: Side
    our_losses: list[float]
    their_losses: list[float]
    transport: str = ""

    @property
    def loss_error(self) -> float:
        """Largest relative difference of the two sides' losses of the same step; NaN if a loss is NaN."""
        return loss_difference(self.our_losses, self.their_losses)

    @property
    def agrees(self) -> bool:
        """Whether the losses of both sides agree. Otherwise, their times have no meaning."""
        return self.loss_error <= LOSSES_AGREE

    @property
    def ratio(self) -> Spread:
        """Ratio of our time to theirs."""
        return ratios(self.ours, self.theirs)

    @property
    def memory(self) -> float:
        """Ratio of our peak memory to theirs."""
        return self.ours.peak / self.theirs.peak

    def as_dict(self) -> dict[str, Any]:
        """Return all figures in seconds and bytes."""
        return {
            "transport": self.transport,
            "loss_error": self.loss_error,
            "ratio": self.ratio._asdict(),
            "memory_ratio": self.memory,
            "plain": {"seconds": median(self.plain.seconds), "turns": self.plain.seconds},
            **{name: self._side(side) for name, side in (("ours", self.ours), ("theirs", self.theirs))},
        }

    def _side(self, side: Side) -> dict[str, Any]:
        return {
            "seconds": median(side.seconds),
            "parts": side.parts(self.plain)._asdict(),
            "over_plain": ratios(side, self.plain)._asdict(),
            "peak_bytes": side.peak,
            "turns": side.seconds,
        }


SHARED = "shared"
"""Name of our transport by shared memory. PyTorch's side uses it as a backend of torch.distributed."""

Family = Literal["data", "tensor", "pipeline"]
"""Kind of parallelism: `data` splits sequences over the ranks, `tensor` splits matrices, `pipeline` splits layers."""

OPTIMIZER = OptimizerConfig(learning_rate=3e-4, learning_rate_schedule="constant", warmup_steps=0)
"""Settings of the optimizer on both sides: fused AdamW with a constant learning rate."""

MICROBATCHES = 8
"""Number of microbatches of a pipeline's step."""

SEED = 1


class Size(NamedTuple):
    """Model and its batch.

    Attributes:
        name: name in the table.
        model: the model that is trained.
        sequences: sequences of a step on all ranks together.
    """

    name: str
    model: GPT
    sequences: int

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.sequences * self.model.seq_len

    def title(self, ranks: int) -> str:
        """Return the heading of a table: the model, its batch, and the number of ranks."""
        return f"{self.name}: {self.model.hidden_size} wide, {self.tokens:,} tokens a step, {ranks} ranks"


SIZES = {
    "small": Size("small", GPT(layers=6, hidden_size=256, heads=4, vocab_size=256, seq_len=128), 16),
    "overhead": Size("overhead", GPT(layers=24, hidden_size=32, heads=4, vocab_size=256, seq_len=16), 16),
}
"""Models by name: one with 4.9 million parameters, and one with many tiny layers."""


@dataclass(frozen=True)
class StrategyPair:
    """Strategy of Shardlab, and its counterpart in PyTorch.

    Attributes:
        name: name of our strategy.
        theirs, api: name and full path of PyTorch's counterpart.
        family: kind of parallelism.
        min_ranks: smallest number of ranks at which the strategy differs from those of other pairs.
        replicas: number of copies of the optimizer state, each sharded over its ranks (None: every rank has the whole
            state).
        stages: pipeline stages of each rank.
        passes: names of the passes that rewrite our program.
    """

    name: str
    theirs: str
    api: str
    family: Family
    min_ranks: int = 2
    replicas: int | None = None
    stages: int = 1
    passes: str = "none"

    def shards(self, ranks: int) -> int:
        """Return the number of shards of the optimizer state."""
        return 1 if self.replicas is None else ranks // self.replicas

    def sized(self, size: Size, ranks: int) -> Size:
        """Return the size with a number of layers that suits the pipeline.

        If a rank has several stages, all stages get the same length, since a pipeline waits for the longest one.
        """
        stages = self.stages * ranks
        if self.stages == 1 or size.model.layers % stages == 0:
            return size
        return size._replace(model=replace(size.model, layers=-(-size.model.layers // stages) * stages))

    def job(self, size: Size, ranks: int) -> Job:
        """Return the job of our side: the strategy on the model."""
        microbatches = {"data": ranks, "tensor": 1, "pipeline": MICROBATCHES}[self.family]
        program, rows = load(self.name).for_job(ranks), size.sequences // microbatches
        return Job(program, ranks, microbatches, size.model, rows, seed=SEED, name=self.name, passes=self.passes)

    def plan(self, ranks: int) -> Plan:
        """Return the plan of our strategy."""
        plan = load(self.name).plan
        assert plan is not None, f"{self.name} is a page"
        return plan(ranks)

    def why_not(self, size: Size, ranks: int) -> str:
        """Return the reason why the pair cannot run with this size on `ranks` ranks; empty if it can."""
        if ranks < self.min_ranks:
            return f"two replicas of two shards need {self.min_ranks} ranks: give --ranks {self.min_ranks}"
        if self.family == "data" and size.sequences % ranks:
            return f"{size.sequences} sequences do not divide among {ranks} ranks"
        if self.family == "tensor" and size.model.heads % ranks:
            return f"{size.model.heads} heads do not divide among {ranks} ranks"
        if self.family == "pipeline" and size.model.layers < ranks:
            return f"{size.model.layers} layers do not reach {ranks} stages"
        return ""


PAIRS = {
    pair.name: pair
    for pair in (
        StrategyPair("ddp", "DDP", "torch.nn.parallel.DistributedDataParallel", "data"),
        StrategyPair(
            "zero-1", "DDP, ZeroRedundancy", "torch.distributed.optim.ZeroRedundancyOptimizer", "data", replicas=1
        ),
        StrategyPair("zero-3", "FSDP2", "torch.distributed.fsdp.fully_shard", "data", replicas=1),
        StrategyPair("fsdp", "FSDP2", "torch.distributed.fsdp.fully_shard", "data", replicas=1),
        StrategyPair("hsdp", "FSDP2, 2-D mesh", "torch.distributed.fsdp.fully_shard", "data", min_ranks=4, replicas=2),
        StrategyPair("tensor-parallel", "DTensor", "torch.distributed.tensor.parallel.parallelize_module", "tensor"),
        StrategyPair("gpipe", "GPipe", "torch.distributed.pipelining.ScheduleGPipe", "pipeline"),
        StrategyPair("1f1b", "1F1B", "torch.distributed.pipelining.Schedule1F1B", "pipeline"),
        StrategyPair(
            "interleaved-1f1b",
            "interleaved 1F1B",
            "torch.distributed.pipelining.ScheduleInterleaved1F1B",
            "pipeline",
            stages=2,
        ),
        StrategyPair("zb-v", "ZB-V", "torch.distributed.pipelining.ScheduleZBVZeroBubble", "pipeline", stages=2),
    )
}
"""Every pair, by the name of our strategy."""


def find_pairs(names: tuple[str, ...], passes: str = "none") -> list[StrategyPair]:
    """Return the pairs with these names, or all pairs if there are no names.

    Args:
        passes: names of the passes that rewrite our programs.

    Raises:
        UserError: if there is no such pair or pass. The message suggests the nearest name.
    """
    named_passes(passes)
    pairs = [find_by_name(PAIRS, name, "pair with a strategy") for name in names] or PAIRS.values()
    return [replace(pair, passes=passes) for pair in pairs]


@dataclass(frozen=True)
class PairRow:
    """Row of the table: a pair with one size.

    Attributes:
        pair, size: the pair and the size.
        compared: the comparison; None if the pair was not compared.
        why_not: reason why the pair was not compared.
        failed: whether the comparison failed.
    """

    pair: StrategyPair
    size: Size
    compared: Comparison | None = None
    why_not: str = ""
    failed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for --json."""
        model = self.size.model
        return {
            "strategy": self.pair.name,
            "pytorch": self.pair.api,
            "passes": self.pair.passes,
            "size": self.size.name,
            "layers": model.layers,
            "hidden_size": model.hidden_size,
            "parameters": model.parameter_count,
            "tokens": self.size.tokens,
            "why_not": self.why_not or None,
            **(self.compared.as_dict() if self.compared else {}),
        }


def as_json(rows: Sequence[dict[str, Any]], ranks: int, turns: int, flags: str, load: float) -> dict[str, Any]:
    """Return the rows with the conditions of the measurement, in seconds and bytes.

    Args:
        flags: further options of the command.
        load: load average of the last minute before the first pair.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(this_machine()),
        "python": platform.python_version(),
        "torch": version("torch"),
        "command": f"shardlab bench strategies --ranks {ranks} --turns {turns} {flags}",
        "load_before": load,
        "load_after": os.getloadavg()[0],
        "ranks": ranks,
        "rows": rows,
    }
