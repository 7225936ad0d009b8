"""Cases and verdicts of `shardlab verify`.

`CASES` has the cases of `--all`: every strategy by name, and every sharding with every pipeline schedule. `verify`
starts the ranks of one job and returns their `Verdict`. The comparison itself is in `verify.py`, which imports torch;
the process that starts the ranks does not need it.
"""

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
"""Shardings of `verify --all`. Each runs with every pipeline. A new sharding is one line here."""

WIDE = 16384
"""Number of hidden features at which a feed-forward layer recomputes the input of its second product, even if two ranks
split the layer (see `RECOMPUTED_FROM` in models/primitives.py)."""

NO_PIPELINE = "none"
PIPELINES = (NO_PIPELINE, *SCHEDULES)
"""Pipelines of `verify --all`: none, or pp 2 with one of the schedules."""

ALONE = "alone"
"""Value of `Case.column` for strategies by name, which are not combined with a sharding."""


@dataclass(frozen=True)
class Case:
    """Strategy to verify, on a small model.

    Attributes:
        row, column: name of the pipeline (or of the strategy), and name of the sharding (or `ALONE`).
        strategy: a name or a plan.
        ranks: number of processes.
        layers: layers of the model.
        microbatches: microbatches of a step, of all ranks together.
        dropout: dropout of the model.
        passes: names of the passes that rewrite the program (None: those of the plan, or none).
        ffn_hidden_size: hidden features of the feed-forward layers (None: the model's default).
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


def named_cases() -> Iterator[Case]:
    """Yield every strategy by name on its default number of ranks."""
    for entry in STRATEGIES.values():
        layers = entry.default_layers(entry.ranks)
        yield Case(entry.name, ALONE, entry.name, entry.ranks, layers, 4)


def paired_cases() -> Iterator[Case]:
    """Yield every sharding with each of `PIPELINES`, and with 2, 3 and 4 microbatches on each data-parallel rank.

    With 3 microbatches the stages are uneven, a stage gathers its weights once for all of its layers, there is dropout,
    and feed-forward layers are wide (`WIDE`). With 4 microbatches there is full recomputation.
    """
    for column, sharding in SHARDINGS.items():
        for row in PIPELINES:
            plan = sharding
            if row != NO_PIPELINE:
                plan = replace(plan, mesh=replace(plan.mesh, pp=2), schedule=row)
            for microbatches_per_rank in (2, 3, 4):
                uneven = microbatches_per_rank == 3
                recompute = "full" if microbatches_per_rank == 4 else sharding.recompute
                plan = replace(plan, reshard_after="stage" if uneven else "layer", recompute=recompute)
                layers = max(plan.natural_layers(), 2) + uneven
                dropout, wide = (0.1, WIDE) if uneven else (0.0, None)
                ranks, microbatches = plan.mesh.world, microbatches_per_rank * plan.data_ranks
                yield Case(row, column, plan, ranks, layers, microbatches, dropout, ffn_hidden_size=wide)


CASES = [*named_cases(), *paired_cases()]
"""All cases."""

TOLERANCE = 1e-12
"""Largest accepted error in float64, whose rounding error is 1e-16.

Another order of summation changes gradients by some 1e-15 of their largest element. `EPS` of `verify.py` keeps AdamW
from amplifying that: the largest error of all `CASES` is 4.0e-15. The tolerance is larger because larger models have
longer sums.
"""

SMALL_NORM = 0.1
"""Largest norm of gradients in programs that clip. It is so small that every gradient is clipped."""


@dataclass(frozen=True)
class Errors:
    """Differences between the results of two trainings.

    Attributes:
        loss_error: largest relative difference of a step's loss.
        gradient_error: largest error of a layer's gradient, over all layers and steps. The error is max|a - b| / max|b|
            over all parameters of the layer together. A relative error of single elements would be meaningless for
            gradients that are zero, such as that of an attention's key bias.
        weight_error: largest error of a layer's weights after the last step, or of their moving averages.
        gradient_layer, weight_layer: numbers of the layers with these errors.
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
    """Differences between a strategy and one device that trains in the same precision, and the verdict on them.

    Attributes:
        exact: differences between the strategy and one device that trains in float64 (None: the precision is float64
            itself). The error of a layer is here the length of the vector a - b divided by that of b.
        one_device: differences between one device in this precision and one device in float64, with the same measure.
        rounding: machine epsilon of the data type in which layers compute.
    """

    exact: Errors | None = None
    one_device: Errors | None = None
    rounding: float = 0.0

    def __repr__(self) -> str:
        errors = f"loss {self.loss_error:.1e}, gradients {self.gradient_error:.1e}, weights {self.weight_error:.1e}"
        return f"<Verdict {'ok' if self.ok else 'WRONG'}, errors: {errors}>"

    @property
    def ok(self) -> bool:
        """Whether the strategy is correct.

        In float64, every error must be at most 1e-12. In lower precision, a different order of summation alone makes a
        difference. Each error of the strategy against float64 must then be at most twice the error of one device in the
        same precision, plus `rounding`.
        """
        if self.exact is None or self.one_device is None:
            return max(self.all) <= TOLERANCE
        return all(
            ours <= 2 * alone + self.rounding for ours, alone in zip(self.exact.all, self.one_device.all, strict=True)
        )


def clip_for(checked: Checked, clip: float | None) -> float | None:
    """Return the norm to which gradients are clipped: `clip`, or SMALL_NORM if `clip` is None and the program clips."""
    return SMALL_NORM if clip is None and checked.clips else clip


def verify(job: Job, steps: int, clip: float | None = None, compile: bool = False) -> Verdict | None:
    """Train a few steps under a job's strategy on its ranks, and on one device, and compare the results.

    Args:
        job: strategy and model.
        steps: number of steps.
        clip: largest norm of the gradient (None: see `clip_for`).
        compile: compile the layers of the ranks.

    Returns:
        The verdict; None if a launcher has started the ranks and this process is not rank 0.

    Raises:
        Refused: if the program is wrong.
        RankFailed: if a rank fails.
        UserError: if the job cannot run here.
    """
    job.checked()  # first in this process, so that a wrong program is refused before ranks start
    verdict_on_rank = LazyFunction[Verdict | None]("shardlab.train.verification.verify", "verdict_on_rank")
    return run_ranks(job.ranks, verdict_on_rank, job, steps, clip, compile, joining=Rendezvous(dynamo=compile))
