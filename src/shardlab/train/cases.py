"""Cases of `shardlab verify --all`: every strategy alone, and every sharding with every pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardlab.models import GPT, MLP, Blocks, MoE
from shardlab.program import Mesh
from shardlab.strategies import STRATEGIES, find
from shardlab.strategies.plan import Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.train.job import Job

SHARD = ("dp_shard",)
TWO = Mesh(dp_shard=2)
FOUR = Mesh(dp_replicate=2, dp_shard=2)
FSDP = Plan(TWO, shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD)

SHARDINGS = {
    "ddp": Plan(TWO),
    "zero-1": Plan(TWO, shard_optimizer=SHARD),
    "zero-2": Plan(TWO, shard_gradients=SHARD, shard_optimizer=SHARD),
    "fsdp": FSDP,
    "hsdp": replace(FSDP, mesh=FOUR),
    "partial": replace(FSDP, mesh=FOUR, shard_optimizer=("dp_shard", "dp_replicate")),
    "tp": Plan(Mesh(tp=2)),
    "tp+sp+zero-1": Plan(Mesh(dp_shard=2, tp=2), shard_optimizer=SHARD, sequence_parallel=True),
    "tp+fsdp": replace(FSDP, mesh=Mesh(dp_shard=2, tp=2)),
    "cp": Plan(Mesh(cp=2)),
    "cp+tp+sp": Plan(Mesh(cp=2, tp=2), sequence_parallel=True, recompute="selective"),
    "cp+zero-2": Plan(Mesh(dp_shard=2, cp=2), shard_gradients=SHARD, shard_optimizer=SHARD, context="all_gather"),
    "ep": Plan(Mesh(ep=2)),
    "ep+fsdp": replace(FSDP, mesh=Mesh(dp_shard=2, ep=2)),
}
"""The columns: each is put on every pipeline. A new one is one line here."""

WIDE = 16384
"""Hidden features with which both products of a feed-forward are large, also in two slices."""

NO_PIPELINE = "none"
PIPELINES = (NO_PIPELINE, *SCHEDULES)
"""The rows."""

ALONE = "alone"
"""The column of strategies by name."""


@dataclass(frozen=True)
class Case:
    """One thing to verify.

    Attributes:
        row, column: its place in the table.
        strategy: a name or a plan.
        ranks: how many processes it takes.
        layers: of the model.
        microbatches: of the step.
        dropout: the model's.
        passes: what rewrites the program, by name (None: what the plan says, or else nothing).
        ffn_hidden_size: the model's (None: its usual one, whose products are small; see `WIDE`).
    """

    row: str
    column: str
    strategy: str | Plan
    ranks: int
    layers: int
    microbatches: int
    dropout: float = 0.0
    passes: str | None = None
    ffn_hidden_size: int | None = None

    def __str__(self) -> str:
        return f"{self.row}, {self.column}, {self.microbatches} microbatches"

    def job(self) -> Job:
        model: Blocks
        if isinstance(self.strategy, str) and find(self.strategy).columns:
            model = MLP(layers=self.layers, hidden_size=16, seq_len=8, dropout=self.dropout)
        else:
            experts = self.column.startswith("ep") or self.strategy == "expert-parallel"
            kind = MoE if experts else GPT
            model = kind(layers=self.layers, hidden_size=16, heads=2, seq_len=8, dropout=self.dropout)
        model = replace(model, ffn_hidden_size=self.ffn_hidden_size)
        return Job(self.strategy, self.ranks, self.microbatches, model, 2, "fp64", name=str(self), passes=self.passes)


def alone() -> Iterator[Case]:
    """Every strategy by name on its usual number of ranks."""
    for entry in STRATEGIES.values():
        layers = entry.default_layers(entry.ranks)
        yield Case(entry.name, ALONE, entry.name, entry.ranks, layers, 4)


def pairs() -> Iterator[Case]:
    """Every sharding with every pipeline of two ranks, at 2 to 4 microbatches on each data-parallel rank.

    With 3 microbatches the stages are uneven, weights are kept for a whole visit of a stage, there is dropout, and
    feed-forwards are wide; with 4 layers keep only their input for the backward pass.
    """
    for column, sharding in SHARDINGS.items():
        for row in PIPELINES:
            plan = sharding
            if row != NO_PIPELINE:
                plan = replace(plan, mesh=replace(plan.mesh, pp=2), schedule=row)
            for each in (2, 3, 4):
                uneven = each == 3
                recompute = "full" if each == 4 else sharding.recompute
                plan = replace(plan, reshard_after="stage" if uneven else "layer", recompute=recompute)
                layers = max(plan.natural_layers(), 2) + uneven
                dropout, wide = (0.1, WIDE) if uneven else (0.0, None)
                ranks, microbatches = plan.mesh.world, each * plan.data_ranks
                yield Case(row, column, plan, ranks, layers, microbatches, dropout, ffn_hidden_size=wide)


CASES = [*alone(), *pairs()]
"""Everything."""
