"""`shardlab simulate ... --model NAME --cluster NAME`: a step in seconds and bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from shardlab.check import Checked
from shardlab.cli.cluster import cluster_called
from shardlab.cli.global_batch import AS_USUAL, BatchRequest
from shardlab.cli.plan_options import PlanOptions
from shardlab.cli.recipe_option import as_recipe_does, precision_of, recipe_called
from shardlab.cli.strategy import checked
from shardlab.program import AXES, Mesh, Sizes, UserError
from shardlab.program.bounds import max_ops
from shardlab.program.precision import Optimizer
from shardlab.strategies.entry import StrategyEntry
from shardlab.strategies.load import load
from shardlab.strategies.plan import Plan
from shardlab.timeline.traced import stands_for

if TYPE_CHECKING:
    from shardlab.passes import Passed
    from shardlab.predict.estimate import Estimate, Peak
    from shardlab.predict.held import HeldMemory
    from shardlab.predict.workload import Workload

MOST_CHECKED = 100_000
"""Ops on all ranks of a plan that is checked before it is priced: a matter of seconds."""

MOST_ALONG = 100_000
"""Ranks along an axis, of a plan whose ranks are folded: what they hold is put together one by one."""

FLOPS_CONVENTION = (
    "products of matrices, forward and twice as many backward; attention as a whole square; "
    "nothing for what is computed again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)"
)


@dataclass(frozen=True)
class PricedStep:
    """A priced step.

    Attributes:
        entry: the strategy.
        workload, estimate: what was simulated, and what came out.
        held: what the fullest device holds.
        names: of the model and the cluster.
        checked: whether the tapes of all ranks were checked; those of a large plan are not, whose alike ranks are
            simulated once.
        notes: what was done to the model that a reader should know.
        passed: the program as it was written, and as each pass left it (none: no pass was asked for).
    """

    entry: StrategyEntry
    workload: Workload
    estimate: Estimate
    held: HeldMemory
    names: tuple[str, str]
    checked: bool
    notes: list[str]
    passed: list[Passed]


def price(
    strategy: str | None,
    layout: PlanOptions,
    model_name: str,
    cluster_name: str,
    *,
    precision: str | None = None,
    recipe: str | None = None,
    optimizer: Optimizer = "adamw",
    ema: bool = False,
    ranks: int | None = None,
    layers: int | None = None,
    sequence: int | None = None,
    memory: str | None = None,
    batch: BatchRequest = AS_USUAL,
    other_machine: bool = False,
) -> PricedStep:
    """Simulate what the command line asks for; what it leaves out is None.

    Args:
        strategy: its name.
        layout: flags of a plan.
        precision: by name; without one, the recipe's: bfloat16 where the device has it.
        recipe: how the step is run, by name; without one, as Shardlab runs it.
        optimizer: what makes a step of a gradient.
        ema: whether an average of the weights is kept.
        sequence: tokens of a sequence.
        memory: of each device that may be taken.
        batch: how large the global batch is, and how it is cut.
        other_machine: take a profile from another machine.

    Raises:
        UserError: for names that are unknown, sizes that do not fit, and a plan that does not fit into memory.
        Refused: for a program that is wrong.
    """
    from shardlab.models import GPT, find_model
    from shardlab.models.named import with_fields
    from shardlab.predict.limits import broken_limit
    from shardlab.predict.memory_advice import require_memory
    from shardlab.predict.workload import Workload
    from shardlab.program.precision import find_precision

    cluster = cluster_called(cluster_name, other_machine=other_machine, memory=memory)
    changes = {"seq_len": sequence, "layers": layers}
    given = {name: value for name, value in changes.items() if value is not None}
    model = with_fields(find_model(model_name), given, model_name)
    entry, ranks = layout.entry(strategy, ranks or _ranks(strategy, layout, cluster.size))
    cluster.require(ranks)
    way = recipe_called(recipe)
    entry = as_recipe_does(entry, ranks, layout, way)
    numbers = find_precision(precision or precision_of(way, cluster))
    mesh, notes, whole = entry.grid(ranks), list[str](), model
    if entry.plan is None and model.borrowed(model.layers - 1):
        notes.append(
            f"{entry.name} computes whole blocks, which share no weights, so the tied head of {model_name} is "
            f"priced as {model.vocab_size * model.hidden_size:,} parameters of its own (plans keep it tied)"
        )
        assert isinstance(model, GPT), "no other model has a tied head"
        model = replace(model, tied=False)

    def trace(_: Mesh, sizes: Sizes, microbatches: int) -> Checked:
        return _runs(entry, checked(entry, ranks, sizes, microbatches), cluster_name)

    plan = mesh if entry.plan is None else entry.plan(ranks)
    microbatches, micro_batch_size = batch.cut(cluster.size, plan.data_ranks if isinstance(plan, Plan) else None)
    workload = Workload(
        plan,
        model,
        cluster,
        microbatches,
        micro_batch_size,
        numbers,
        trace if entry.plan is None else None,
        entry.columns,
        way,
        optimizer=optimizer,
        ema=ema,
        passes=entry.passes,
        tiles=entry.tiles_on(ranks),
    )
    if entry.plan is None:
        entry.require_ops(1, model.layers, batch.microbatches or 1)
    _require_few_ranks(entry, workload, cluster_name)
    rewritten = workload.pass_names != "none"
    alike = entry.plan is not None and not rewritten and _ops_on_all_ranks(workload) > MOST_CHECKED
    if rewritten:
        _runs(entry, workload.passed[-1].checked, cluster_name)
    elif entry.plan is not None and not alike:
        trace(mesh, workload.traced.program.sizes, microbatches)
    estimate = workload.estimate()
    held = require_memory(workload, estimate, whole)
    notes += [*_useless_recompute(workload, estimate), *doubts(workload, estimate, cluster_name)]
    if limit := broken_limit(workload):
        notes.insert(0, limit)
    passed = workload.passed if rewritten else []
    return PricedStep(entry, workload, estimate, held, (model_name, cluster_name), not alike, notes, passed)


def _runs(entry: StrategyEntry, proof: Checked, cluster: str) -> Checked:
    """See that a program runs on a cluster's devices."""
    if (why := proof.why_not("nccl")) is not None:
        raise UserError(f"{entry.name} cannot be timed on {cluster}: {why}")
    return proof


def _require_few_ranks(entry: StrategyEntry, workload: Workload, cluster: str) -> None:
    """Refuse what would take minutes before the simulation begins."""
    mesh = workload.mesh
    axis, size = max(mesh.sizes().items(), key=lambda item: item[1])
    if entry.plan is not None:
        if size > MOST_ALONG:
            raise UserError(
                f"{entry.name} on {cluster} has {size:,} ranks along {axis}, and at most {MOST_ALONG:,} along an axis "
                "are simulated; take fewer devices, or a mesh of more axes"
            )
        return
    at_least = 3 * workload.cut.layers * mesh.world // mesh.pp
    if at_least > max_ops():
        flag = axis.replace("_", "-")
        raise UserError(
            f"{entry.name} on {cluster} would trace {mesh.world:,} ranks one by one, {at_least:,} ops or more; a plan "
            f"folds those that are alike: --{flag} {min(size, MOST_ALONG)}"
        )


def _useless_recompute(workload: Workload, estimate: Estimate) -> list[str]:
    """Note that selective recomputation saves nothing, if the same plan without it takes no more memory."""
    plan = workload.plan
    if not isinstance(plan, Plan) or plan.recompute != "selective":
        return []
    if replace(workload, plan=replace(plan, recompute="none")).peak_bytes() > estimate.peak.bytes:
        return []
    return [
        "--recompute selective saves no memory here, because attention scores are not stored anyway "
        "(they are with dropout, or without a fused kernel); leave it out"
    ]


def doubts(workload: Workload, estimate: Estimate, cluster: str) -> list[str]:
    """List what a reader of the figures should know."""
    notes = list(map(str, estimate.traced.drifts)) if isinstance(estimate.traced, Checked) else []
    if idle := workload.cluster.size - workload.mesh.world:
        notes.append(f"{idle:,} of the {workload.cluster.size:,} devices of {cluster} are idle")
    if (mfu := workload.mfu(estimate.step)) > 1:
        notes.append(
            f"an MFU of {mfu:.0%} is more than the device can reach, so the predicted time is wrong: the "
            f"profile or the efficiencies of {cluster} do not fit this step; measure again with shardlab "
            "bench compute"
        )
    return notes


def _ops_on_all_ranks(workload: Workload) -> int:
    program = workload.traced.program
    return sum(map(len, program.tapes)) * program.mesh.world // program.ranks


def _ranks(strategy: str | None, layout: PlanOptions, size: int) -> int | None:
    """The whole cluster, unless the strategy or the flags say how many ranks there are."""
    named = any(getattr(layout, axis) for axis in AXES) or layout.plan is not None
    alone = strategy is not None and load(strategy).ranks == 1
    return None if named or alone else size


def as_json(result: PricedStep) -> dict[str, Any]:
    """Describe the step for other programs; in seconds, bytes and shares."""
    from shardlab.predict.assumed_figures import assumed_figures

    workload, estimate, entry = result.workload, result.estimate, result.entry
    program, step = estimate.traced.program, estimate.step
    return {
        "strategy": entry.name,
        **({"plan": entry.plan(workload.mesh.world).as_dict()} if entry.plan else {}),
        "model": result.names[0],
        "cluster": result.names[1],
        "recipe": workload.recipe.name,
        "precision": workload.precision.name,
        "ranks": workload.mesh.world,
        "idle_devices": workload.cluster.size - workload.mesh.world,
        "mesh": workload.mesh.used,
        "layers": program.layers,
        "global_batch": workload.microbatches * workload.micro_batch_size,
        "microbatches": workload.microbatches,
        "micro_batch_size": workload.micro_batch_size,
        "tokens": workload.tokens,
        "step_seconds": step,
        "tokens_per_second": workload.tokens / step,
        "tokens_per_second_per_device": workload.tokens / step / workload.mesh.world,
        "model_flops": workload.flops,
        "mfu": workload.mfu(step),
        "flops_convention": FLOPS_CONVENTION,
        "compute_share": estimate.compute_share,
        "exposed_share": estimate.exposed_share,
        "exposed": [
            {"kind": kind, "axis": axis, "share": share, "seconds": share * step}
            for (kind, axis), share in estimate.exposed.items()
        ],
        "bubble_share": estimate.bubble_share,
        "peak_memory": estimate.peak.bytes,
        "device_memory": workload.cluster.device.memory,
        "assumed": {name: asdict(figure) for name, figure in assumed_figures(workload).items()},
        "memory_held": result.held.total,
        "memory_held_by_part": result.held.parts,
        "peak_memory_by_rank": [_peak(peak, stands_for(program, row)) for row, peak in enumerate(estimate.peaks)],
        "ops": sum(map(len, program.tapes)),
        "ranks_simulated": program.ranks,
        "checked": result.checked,
        "notes": result.notes,
    }


def _peak(peak: Peak, ranks: range) -> dict[str, Any]:
    return {
        "rank": peak.rank,
        "first_rank": ranks[0],
        "last_rank": ranks[-1],
        "bytes": peak.bytes,
        "by_category": peak.by_category,
        "cause": {"op": peak.op and peak.op.value, "layer": peak.layer, "part": peak.part, "text": peak.cause},
    }
