"""Cases of `shardlab verify --all`: every strategy alone, and every sharding with every pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardlab.check import Checked
from shardlab.language import Mesh
from shardlab.models import GPT, MLP, Blocks, MoE
from shardlab.strategies import STRATEGIES, find
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.schedules import SCHEDULES
from shardlab.train.job import Job
from shardlab.train.launch.ranks import LazyFunction, Rendezvous, run_ranks

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


# Verdict on a strategy whose numbers are compared with one device's, and the start of the ranks that compare them.
#
# The comparison itself is in `shardlab.train.verification.verify`, which needs torch; the process that starts the
# ranks needs none.


TOLERANCE = 1e-12
"""Largest error of float64, whose rounding is 1e-16; sums in another order give gradients some 1e-15 of their largest
element apart.

AdamW can make that more: it divides by the gradient's size, so an error d of a gradient g near eps (1e-8) moves the
weight by rate * d * eps / (|g| + eps)^2 in the first step. The small MLP on which `column-parallel` is verified has a
weight whose gradient is 3e-8 of a largest 2.5e-2: there 1.4e-18 becomes 3.5e-13 of the layer's largest weight.
"""

SMALL_NORM = 0.1
"""Norm so small that it clips every gradient, for programs that clip."""


@dataclass(frozen=True)
class Errors:
    """How far some numbers are from others.

    Attributes:
        loss_error: largest relative difference of a step's loss.
        gradient_error, weight_error: of the worst layer (and step; averages are weights), max|a - b| / max|b| over all
            its parameters together; elementwise, a gradient of zero (an attention's key bias has one) would make it
            meaningless.
        gradient_layer, weight_layer: the worst layers.
    """

    loss_error: float
    gradient_error: float
    gradient_layer: int
    weight_error: float
    weight_layer: int

    @property
    def all(self) -> tuple[float, float, float]:
        return self.loss_error, self.gradient_error, self.weight_error


@dataclass(frozen=True)
class Verdict(Errors):
    """How far a strategy's numbers are from one device's in the same precision.

    Attributes:
        exact: how far they are from one device's in float64, as lengths of vectors (None: these are in float64).
        one_device: how far one device's in the same precision are from those.
        rounding: of the dtype that layers compute in: the distance from 1 to the next number.
    """

    exact: Errors | None = None
    one_device: Errors | None = None
    rounding: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether every error is within 1e-12; of lower precision, within twice one device's, and a rounding more.

        In lower precision sums in another order differ by its rounding, so what counts is that the strategy is as near
        to the exact numbers as one device.
        """
        if self.exact is None or self.one_device is None:
            return max(self.all) <= TOLERANCE
        return all(
            ours <= 2 * alone + self.rounding for ours, alone in zip(self.exact.all, self.one_device.all, strict=True)
        )


def clip_for(checked: Checked, clip: float | None) -> float | None:
    """The norm to which gradients are clipped: as given, or so small that every gradient is, if the program clips."""
    return SMALL_NORM if clip is None and checked.clips else clip


def verify(job: Job, steps: int, clip: float | None = None, compile: bool = False) -> Verdict | None:
    """Train `steps` steps under the job's strategy on its ranks, and on one device, and compare.

    Args:
        clip: the largest norm of the gradient (None: see `clip_for`).
        compile: compile the layers of the ranks.

    Returns:
        The verdict; None in a process of an existing world that is not rank 0.

    Raises:
        Refused: when the program is wrong.
        RankFailed: when a rank raised.
        UserError: for a request that cannot be met.
    """
    job.checked()  # in this process first: a refusal needs no ranks
    verdict_on_rank = LazyFunction[Verdict | None]("shardlab.train.verification.verify", "verdict_on_rank")
    return run_ranks(job.ranks, verdict_on_rank, job, steps, clip, compile, joining=Rendezvous(dynamo=compile))
