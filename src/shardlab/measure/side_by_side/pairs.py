"""The pairs: a strategy of ours, and the part of PyTorch that does the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from shardlab.errors import find
from shardlab.models import GPT
from shardlab.optimizers import OptimizerConfig
from shardlab.program.pass_names import named_passes
from shardlab.strategies.load import load
from shardlab.strategies.plan import Plan
from shardlab.train.job import Job

Family = Literal["data", "tensor", "pipeline"]
"""A way to be parallel: `data` deals sequences to the ranks, `tensor` slices of matrices, `pipeline` layers."""

OPTIMIZER = OptimizerConfig(learning_rate=3e-4, learning_rate_schedule="constant", warmup_steps=0)
"""Fused AdamW on both sides, at one learning rate."""

MICROBATCHES = 8
"""Microbatches of a pipeline's step."""

SEED = 1


class Size(NamedTuple):
    """A model and its batch.

    Attributes:
        name: for a reader.
        model: what is trained.
        sequences: of a step, on all ranks together.
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
    """A strategy of ours, and PyTorch's.

    Attributes:
        name: of our strategy.
        theirs, api: what does the same in PyTorch, for a reader and in full.
        family: what is dealt to the ranks.
        least: ranks with which it differs from another pair.
        replicas: copies of the optimizer's state, each cut over its ranks (None: every rank has all of its own).
        stages: pipeline stages of each rank.
        passes: what rewrites our program, by name.
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
        """Into how many parts the optimizer's state is cut."""
        return 1 if self.replicas is None else ranks // self.replicas

    def sized(self, size: Size, ranks: int) -> Size:
        """The size with as many layers as suit the pipeline: where a rank has several stages, all of one length, since
        a pipeline waits for its longest one."""
        stages = self.stages * ranks
        if self.stages == 1 or size.model.layers % stages == 0:
            return size
        return size._replace(model=replace(size.model, layers=-(-size.model.layers // stages) * stages))

    def job(self, size: Size, ranks: int) -> Job:
        """Our side: the strategy on the model."""
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
        """The plan that our strategy is."""
        plan = load(self.name).plan
        assert plan is not None, f"{self.name} is a page"
        return plan(ranks)

    def why_not(self, size: Size, ranks: int) -> str:
        """Why the pair cannot be run with this size on so many ranks; nothing if it can."""
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


def pairs_named(names: tuple[str, ...], passes: str = "none") -> list[StrategyPair]:
    """The pairs of these names; all if there are none.

    Args:
        passes: what rewrites our programs, by name.

    Raises:
        UserError: when there is no such pair or pass; the nearest is named.
    """
    named_passes(passes)
    found = [find(PAIRS, name, "pair with a strategy") for name in names] or PAIRS.values()
    return [replace(pair, passes=passes) for pair in found]
