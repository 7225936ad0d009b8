"""Results of a comparison in seconds and bytes, and the pairs that are compared.

`Side` has the timed steps of one side, `Comparison` those of a pair, and `as_json` the whole table. `PAIRS` lists our
strategies with PyTorch's counterpart, and `SIZES` the models.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple, Protocol

from shardlab.common.errors import find_by_name
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.language.pass_names import named_passes
from shardlab.measure.profile import this_machine
from shardlab.models import GPT
from shardlab.strategies.load import load
from shardlab.strategies.plan.plan import Plan
from shardlab.train.job import Job

LOSSES_AGREE = 1e-4
"""Largest relative difference of losses that counts as equal."""


class Spread(NamedTuple):
    """Median of several figures, with the quartiles below and above it."""

    low: float
    median: float
    high: float


def spread_of(figures: Sequence[float]) -> Spread:
    """Return the quartiles of some figures; of a single one, the figure three times."""
    return Spread(*(quantiles(figures, n=4, method="inclusive") if len(figures) > 1 else [*figures] * 3))


class Parts(NamedTuple):
    """Parts of the time of a typical step, in seconds.

    Attributes:
        compute: what the floor's thread has a core for: kernels, and autograd as plain PyTorch calls them.
        overhead: for what more than that this side's thread has a core; below zero, it computes less.
        waiting: the rest of the step, in which the thread has no core: it waits for another rank, or for its turn.
    """

    compute: float
    overhead: float
    waiting: float


@dataclass(frozen=True)
class Side:
    """Timed steps of one side.

    Attributes:
        seconds: seconds of each step on the slowest rank.
        computing: seconds of each step for which the training thread had a core, the mean over ranks.
        peak: most bytes of any rank.
    """

    seconds: list[float]
    computing: list[float]
    peak: int

    def parts(self, floor: Side) -> Parts:
        """Return the parts of its time, given the lower bound."""
        whole, had, compute = median(self.seconds), median(self.computing), median(floor.computing)
        return Parts(compute, had - compute, max(0.0, whole - had))

    def over(self, floor: Side) -> Spread:
        """Return the ratios of its steps to those of the lower bound in the same turn."""
        return ratios(self, floor)


def ratios(side: Side, other: Side) -> Spread:
    """Return the ratios of two sides' steps in the same turn: what slows both down cancels."""
    return spread_of([a / b for a, b in zip(side.seconds, other.seconds, strict=True)])


def loss_difference(losses: Sequence[float], others: Sequence[float]) -> float:
    """Return the largest relative difference of two losses; NaN if one of them is NaN."""
    errors = [abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)]
    return max(errors) if all(error == error for error in errors) else float("nan")


@dataclass(frozen=True)
class Comparison:
    """Comparison of a pair.

    Attributes:
        ours, theirs, floor: timed steps of both sides and of the lower bound.
        our_losses, their_losses: mean loss of every step, including warm-up.
        transport: what both sides communicate by: "shared", "gloo" or "nccl".
    """

    ours: Side
    theirs: Side
    floor: Side
    our_losses: list[float]
    their_losses: list[float]
    transport: str = ""

    @property
    def loss_error(self) -> float:
        """Largest relative difference of two losses; NaN if one of them is NaN."""
        return loss_difference(self.our_losses, self.their_losses)

    @property
    def agrees(self) -> bool:
        """Whether both sides train alike; otherwise their times have no meaning."""
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
            "floor": {"seconds": median(self.floor.seconds), "turns": self.floor.seconds},
            **{name: self._side(side) for name, side in (("ours", self.ours), ("theirs", self.theirs))},
        }

    def _side(self, side: Side) -> dict[str, Any]:
        return {
            "seconds": median(side.seconds),
            "parts": side.parts(self.floor)._asdict(),
            "over_floor": side.over(self.floor)._asdict(),
            "peak_bytes": side.peak,
            "turns": side.seconds,
        }


SHARED = "shared"
"""Transport by shared memory: ours, which PyTorch's side uses as a backend of torch.distributed."""

Family = Literal["data", "tensor", "pipeline"]
"""Kind of parallelism: `data` splits sequences over the ranks, `tensor` matrices, `pipeline` layers."""

OPTIMIZER = OptimizerConfig(learning_rate=3e-4, learning_rate_schedule="constant", warmup_steps=0)
"""Fused AdamW on both sides, at one learning rate."""

MICROBATCHES = 8
"""Microbatches of a pipeline's step."""

SEED = 1


class Size(NamedTuple):
    """Model and its batch.

    Attributes:
        name: name for a reader.
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
"""Models by name: one of 4.9 million parameters, and one of many layers that hardly compute."""


@dataclass(frozen=True)
class StrategyPair:
    """Strategy of ours, and PyTorch's.

    Attributes:
        name: name of our strategy.
        theirs, api: name and full path of PyTorch's counterpart.
        family: kind of parallelism.
        least: fewest ranks with which it differs from other pairs.
        replicas: copies of the optimizer's state, each sharded over its ranks (None: every rank has the whole state).
        stages: pipeline stages of each rank.
        passes: passes on our program, by name.
    """

    name: str
    theirs: str
    api: str
    family: Family
    least: int = 2
    replicas: int | None = None
    stages: int = 1
    passes: str = "none"

    def shards(self, ranks: int) -> int:
        """Return the number of parts of the optimizer's state."""
        return 1 if self.replicas is None else ranks // self.replicas

    def sized(self, size: Size, ranks: int) -> Size:
        """The size with as many layers as suit the pipeline: where a rank has several stages, all of one length, since
        a pipeline waits for its longest one."""
        stages = self.stages * ranks
        if self.stages == 1 or size.model.layers % stages == 0:
            return size
        return size._replace(model=replace(size.model, layers=-(-size.model.layers // stages) * stages))

    def job(self, size: Size, ranks: int) -> Job:
        """Return our side: the strategy on the model."""
        counts = {"data": ranks, "tensor": 1, "pipeline": MICROBATCHES}
        microbatches = counts[self.family]
        entry = load(self.name)
        sequences = size.sequences // microbatches
        return Job(
            entry.for_job(ranks),
            ranks,
            microbatches,
            size.model,
            sequences,
            seed=SEED,
            name=self.name,
            passes=self.passes,
        )

    def plan(self, ranks: int) -> Plan:
        """Return the plan of our strategy."""
        plan = load(self.name).plan
        assert plan is not None, f"{self.name} is a page"
        return plan(ranks)

    def why_not(self, size: Size, ranks: int) -> str:
        """Return why the pair cannot run with this size on some ranks; empty if it can."""
        if ranks < self.least:
            return f"two replicas of two shards need {self.least} ranks: give --ranks {self.least}"
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
        StrategyPair("hsdp", "FSDP2, 2-D mesh", "torch.distributed.fsdp.fully_shard", "data", least=4, replicas=2),
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
    """Return the pairs with these names, or all pairs.

    Args:
        passes: what rewrites our programs, by name.

    Raises:
        UserError: when there is no such pair or pass; the nearest is named.
    """
    named_passes(passes)
    found = [find_by_name(PAIRS, name, "pair with a strategy") for name in names] or PAIRS.values()
    return [replace(pair, passes=passes) for pair in found]


@dataclass(frozen=True)
class PairRow:
    """Row of the table: a pair with one size.

    Attributes:
        pair, size: the pair and the size.
        compared: the comparison; None if there is none.
        why_not: reason why there is none.
        failed: whether something went wrong.
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


class BenchRow(Protocol):
    """Result of a pair of strategies."""

    def as_dict(self) -> dict[str, Any]:
        """Return all fields for --json."""
        ...


def as_json(rows: Sequence[BenchRow], ranks: int, turns: int, flags: str, load: float) -> dict[str, Any]:
    """Rows, and what they were measured on; seconds and bytes throughout.

    Args:
        flags: of the command, beside those.
        load: processes that wished to run before the first pair, the mean over a minute.
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
        "rows": [row.as_dict() for row in rows],
    }
