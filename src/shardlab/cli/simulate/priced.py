"""`shardlab simulate ... --model NAME --cluster NAME`: simulate a step in seconds and bytes.

`price` converts a `StepRequest` into a `Workload`, checks its program and estimates the step. `add_step` reports the
result, a `PricedStep`. Plans are folded: one rank is simulated for each set of identical ranks. The tapes of all ranks
are checked only if they have few ops.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from shardlab.check import Checked, drifts_of
from shardlab.cli.console import Report, print_path
from shardlab.cli.plan_options import checked
from shardlab.cli.simulate.terminal_timeline import print_timeline
from shardlab.cli.step_request import StepRequest
from shardlab.common.text import byte_unit, bytes_text, counted, memory_text, percent_text, seconds_text
from shardlab.common.user_code import MAX_FOLDED_OPS, max_ops
from shardlab.language import Mesh, Sizes, UserError
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.memory import uncounted_memory
from shardlab.simulate.timeline import bubble, schedule_bubble
from shardlab.simulate.timeline.prices import Traced, rank_of, stands_for
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry

if TYPE_CHECKING:
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.passes import PassResult
    from shardlab.simulate.predict.estimate import Estimate, Peak
    from shardlab.simulate.predict.forecast import Forecast
    from shardlab.simulate.predict.memory import DeviceMemory
    from shardlab.simulate.predict.workload import Workload


MOST_CHECKED = 100_000
"""Largest number of ops, over all ranks, for which a plan is checked. Checking so many takes some seconds."""

MOST_ALONG = 100_000
"""Largest number of ranks along an axis of a plan. Slices along an axis are joined one by one even if ranks are
folded."""

FLOPS_CONVENTION = (
    "products of matrices, forward and twice as many backward; attention as a whole square; "
    "nothing for what is computed again (Chowdhery et al. 2022, arXiv 2204.02311, appendix B)"
)
"""Definition of the model FLOPs in the MFU, for --json."""

NAMED_STAGES = 4
"""Largest number of stages whose folded ranks are named: the first ones and the last."""

DRAWN_OPS = 200_000
"""Largest number of ops in a timeline for the terminal. Drawing more takes longer than the simulation."""


@dataclass(frozen=True)
class PricedStep:
    """Result of a simulation in seconds and bytes.

    Attributes:
        entry: strategy.
        workload: simulated step: model, plan, batch, cluster and recipe.
        estimate: result of the simulation. If the step has too many ops to trace, the result for fewer microbatches.
        forecast: time and memory of a step that has too many ops to trace (None: `estimate` has them).
        reserved: memory reserved on the fullest device.
        names: names of the model and the cluster.
        checked: whether the tapes of all ranks were checked. Those of a large folded plan are not.
        notes: remarks for the reader of the figures.
        pass_results: the program as written, and after each pass (empty: no passes were requested).
    """

    entry: StrategyEntry
    workload: Workload
    estimate: Estimate
    forecast: Forecast | None
    reserved: DeviceMemory
    names: tuple[str, str]
    checked: bool
    notes: list[str]
    pass_results: list[PassResult]

    @property
    def step(self) -> float:
        """Duration of the step in seconds."""
        return self.estimate.step if self.forecast is None else self.forecast.seconds

    @property
    def peaks(self) -> Sequence[Peak]:
        """Peak of each simulated rank's memory."""
        return self.estimate.peaks if self.forecast is None else self.forecast.peaks


def price(request: StepRequest) -> PricedStep:
    """Simulate a step of a model on a cluster.

    Raises:
        UserError: for unknown names, sizes that do not fit, and a plan that does not fit into memory.
        Refused: for a wrong program.
    """
    from shardlab.models import GPT
    from shardlab.simulate.predict.forecast import forecast, step_to_trace
    from shardlab.simulate.predict.memory_advice import require_memory
    from shardlab.simulate.predict.workload import Workload

    cluster, model = request.found_cluster, request.found_model
    model_name, cluster_name = str(request.model), str(request.cluster)
    entry, ranks = request.entry()
    precision = request.step_precision
    mesh, notes, whole = entry.grid(ranks), list[str](), model
    if entry.plan is None and model.borrowed(model.layers - 1):
        notes.append(
            f"{entry.name} computes whole blocks, which share no weights, so the tied head of {model_name} is "
            f"priced as {model.vocab_size * model.hidden_size:,} parameters of its own (plans keep it tied)"
        )
        assert isinstance(model, GPT), "no other model has a tied head"
        model = replace(model, tied=False)

    def trace(_: Mesh, sizes: Sizes, microbatches: int) -> Checked:
        return _require_backend(entry, checked(entry, ranks, sizes, microbatches), cluster_name)

    plan = mesh if entry.plan is None else entry.plan(ranks)
    microbatches, micro_batch_size = request.cut_batch(plan.data_ranks if isinstance(plan, Plan) else None)
    workload = Workload(
        plan,
        model,
        cluster,
        microbatches,
        micro_batch_size,
        precision,
        trace if entry.plan is None else None,
        entry.columns,
        request.found_recipe,
        optimizer=request.optimizer,
        ema=request.ema,
        passes=entry.passes,
        tiles=entry.tiles_on(ranks),
    )
    if entry.plan is None:
        entry.require_ops(1, model.layers, request.batch.microbatches or 1)
    request.require_limits(workload)
    _require_few_ranks(entry, workload, cluster_name)
    has_passes = workload.pass_names != "none"
    traced = step_to_trace(workload)
    rough = forecast(workload) if traced is not workload else None
    large = entry.plan is not None and not has_passes and _ops_on_all_ranks(traced) > MOST_CHECKED
    if has_passes:
        _require_backend(entry, workload.pass_results[-1].checked, cluster_name)
    elif entry.plan is not None and not large:
        trace(mesh, traced.traced.program.sizes, traced.microbatches)
    estimate = traced.estimate()
    memory = require_memory(workload, estimate.peaks if rough is None else rough.peaks, whole)
    step = estimate.step if rough is None else rough.seconds
    notes += [*_useless_recompute(traced, estimate), *doubts(workload, estimate.traced, step, cluster_name)]
    if rough is not None:
        notes.append(
            f"a step with {counted(microbatches, 'microbatch')} has more than {MAX_FOLDED_OPS:,} ops, so each kind of "
            "ops was simulated once, and shares of the step and its timeline are left out; fewer microbatches, or "
            "--max-ops, show them"
        )
    if limit := broken_limit(workload):
        notes.insert(0, f"predicted as if {workload.recipe.name} could run it: {limit}")
    results = workload.pass_results if has_passes else []
    return PricedStep(entry, workload, estimate, rough, memory, (model_name, cluster_name), not large, notes, results)


def traced_estimate(result: PricedStep, output: str) -> Estimate:
    """Return the estimate of a step, which must have few enough ops to trace all of them.

    Args:
        result: the step.
        output: name of the output that needs all ops, for the message.

    Raises:
        UserError: if the step has too many ops to trace.
    """
    if result.forecast is not None:
        raise UserError(
            f"{output} needs all ops of the step, which with {counted(result.workload.microbatches, 'microbatch')} are "
            f"more than {MAX_FOLDED_OPS:,}; give fewer microbatches, or raise --max-ops"
        )
    return result.estimate


def doubts(workload: Workload, traced: Traced, step: float, cluster: str) -> list[str]:
    """List reasons to doubt the figures: replicas that drift, idle devices, and an impossible MFU.

    Args:
        workload: simulated step.
        traced: program of the step.
        step: time of the step in seconds.
        cluster: name of the cluster.
    """
    notes = list(map(str, drifts_of(traced))) if isinstance(traced, Checked) else []
    if idle_devices := workload.cluster.size - workload.mesh.world:
        notes.append(f"{idle_devices:,} of the {workload.cluster.size:,} devices of {cluster} are idle")
    if (mfu := workload.mfu(step)) > 1:
        notes.append(
            f"an MFU of {mfu:.0%} is more than the device can reach, so the predicted time is wrong: the "
            f"profile or the efficiencies of {cluster} do not fit this step; measure again with shardlab "
            "bench compute"
        )
    return notes


def add_step(report: Report, result: PricedStep, files: Sequence[Path] = ()) -> None:
    """Add the figures of a step in seconds, bytes and shares, notes, and its timeline to a report.

    Args:
        files: files that were written.
    """
    from shardlab.simulate.predict.confidence import may_not_fit, step_confidence, sure_as_json
    from shardlab.simulate.predict.forecast import switch_effects
    from shardlab.simulate.predict.memory_advice import assumed_figures
    from shardlab.simulate.predict.recipe import OWN

    workload, estimate, entry, memory = result.workload, result.estimate, result.entry, result.reserved
    program, step, peaks, device = estimate.traced.program, result.step, result.peaks, workload.cluster.device
    peak = max(peaks, key=lambda peak: peak.bytes)
    world, sequences = workload.mesh.world, workload.microbatches * workload.micro_batch_size
    report.data |= {
        "strategy": entry.name,
        **({"plan": entry.plan(world).as_dict()} if entry.plan else {}),
        "model": result.names[0],
        "cluster": result.names[1],
        "recipe": workload.recipe.name,
        "switches": dict(workload.recipe.changed_switches),
        "precision": workload.precision.name,
        "ranks": world,
        "idle_devices": workload.cluster.size - world,
        "mesh": workload.mesh.used,
        "layers": program.layers,
        "global_batch": sequences,
        "microbatches": workload.microbatches,
        "micro_batch_size": workload.micro_batch_size,
        "tokens": workload.tokens,
    }
    report.line(Text.assemble((entry.name, "bold cyan"), " of {} on {}".format(*result.names)), wrap=False)
    microbatch = f"{counted(workload.micro_batch_size, 'sequence')} of {workload.model.seq_len} tokens"
    batch = f"global batch {sequences:,}: {counted(workload.microbatches, 'microbatch')} of {microbatch}"
    recipe = "" if workload.recipe == OWN else f", as {workload.recipe.title} runs it"
    report.line(f"{workload.mesh}, {batch}, {workload.precision.name}{recipe}\n", "dim")
    report.fact("step time", "", seconds_text(step), step_seconds=step)
    speed, mfu = workload.tokens / step, workload.mfu(step)
    report.fact("tokens/s", f"{speed / world:,.0f} on each device", f"{speed:,.0f}", tokens_per_second=speed)
    report.data |= {"tokens_per_second_per_device": speed / world, "model_flops": workload.flops}
    report.fact("MFU", f"of {device.name}'s {workload.precision.compute} peak", percent_text(mfu), mfu=mfu)
    report.data["flops_convention"] = FLOPS_CONVENTION
    if result.forecast is None:
        _add_shares(report, workload, estimate)
    text = f"of tensors, on rank {peak.rank}: {peak.cause}"
    report.fact("peak memory", text, bytes_text(peak.bytes), peak_memory=peak.bytes)
    report.fact("", _parts_text(peak.bytes, peak.by_category), "")
    report.data["device_memory"] = device.memory
    parts = f"of {memory_text(device.memory)}: {_parts_text(memory.total, memory.parts)}"
    text = "; ".join(filter(None, (parts, uncounted_memory(workload))))
    report.fact("memory held", text, bytes_text(memory.total))
    report.data |= {"memory_held": memory.total, "memory_held_by_part": memory.parts}
    report.data["peak_memory_by_rank"] = [_peak_as_json(peak, stands_for(program, n)) for n, peak in enumerate(peaks)]
    ops = sum(map(len, program.tapes))
    if result.forecast is None:
        report.fact("ops", f"{ops:,}, on {_ranks_text(result)}", ops=ops, ranks_simulated=program.ranks)
    report.fact("check", _check_text(result), checked=result.checked)
    effects = switch_effects(workload, step)
    if effects:
        report.fact("switches", "; ".join(map(str, effects)) + " of the step time")
    report.data["switch_effects"] = [asdict(effect) for effect in effects]
    add_network(report, workload.cluster, slower_with_few_nics(workload))
    confidences = step_confidence(workload)
    doubt = may_not_fit(confidences, memory.total, memory.capacity)
    report.facts("how sure", [*map(str, confidences), doubt])
    report.data["how_sure"] = sure_as_json(confidences, doubt)
    assumed = assumed_figures(workload)
    report.data |= {"assumed": {name: asdict(figure) for name, figure in assumed.items()}, "notes": result.notes}
    if assumed:
        report.fact("assumed", ", ".join(assumed))
    for note in result.notes:
        report.fact("note", note)
    if ops <= DRAWN_OPS and result.forecast is None:
        report.line()
        report.draw(partial(_print_ranks, result=result))
    for path in files:
        report.draw(partial(print_path, label="written to", path=path))


def _add_shares(report: Report, workload: Workload, estimate: Estimate) -> None:
    """Add the shares of a step for compute, exposed communication and idle time, and the bubble of a pipeline."""
    share, step = estimate.compute_share, estimate.step
    report.fact("compute", "of the step, the mean over ranks", f"{share:.1%}", compute_share=share)
    share, text = estimate.exposed_share, f"compute waits for communication: {_exposed_text(estimate.exposed)}"
    report.fact("exposed", text, f"{share:.1%}", exposed_share=share)
    report.data["exposed"] = [
        {"kind": kind, "axis": axis, "share": share, "seconds": share * step}
        for (kind, axis), share in estimate.exposed.items()
    ]
    share = estimate.idle_share
    report.fact("idle", "a rank waits for others, or has ended", f"{share:.1%}", idle_share=share)
    if workload.mesh.pp > 1:
        add_bubble(report, schedule_bubble(estimate.traced, workload.prices), bubble(estimate.timeline()))


FEWER = 4
"""Factor by which an assumed number of NICs may be too high."""


def add_network(report: Report, cluster: Cluster, slower: float | None = None) -> None:
    """Add the links between devices, and name the assumed ones.

    Args:
        slower: relative increase of the step time with a quarter of the NICs (None: unknown).
    """
    text, nics = cluster.network_text, max(1, cluster.nics // FEWER)
    if slower is not None:
        text += f"; with {counted(nics, 'NIC')} a node the step takes {slower:.0%} longer"
    if text:
        report.fact("network", text)
    report.data["network"] = {**cluster.network, "assumed": cluster.assumed, "slower_with_a_quarter_of_nics": slower}


def slower_with_few_nics(workload: Workload) -> float | None:
    """Return the relative increase of the step time with a quarter of the NICs.

    None if the number of NICs is not assumed, if one node has all ranks, or if the strategy is no plan or has passes.
    """
    from shardlab.simulate.predict.forecast import forecast

    cluster = workload.cluster
    spread = workload.mesh.world > cluster.per_node and "nics" in cluster.assumed and cluster.nics > 1
    if not spread or not isinstance(workload.plan, Plan) or workload.pass_names != "none":
        return None
    fewer_nics = replace(cluster, nics=max(1, cluster.nics // FEWER))
    return forecast(replace(workload, cluster=fewer_nics)).seconds / forecast(workload).seconds - 1


def add_bubble(report: Report, free: float, share: float) -> None:
    """Add the bubble of a pipeline, without and with the time of communication."""
    text = f"from first to last pass; {share:.2%} with communication"
    report.fact("bubble", text, f"{free:.2%}", bubble=free, bubble_with_communication=share)


def _require_backend(entry: StrategyEntry, proof: Checked, cluster: str) -> Checked:
    """Return a checked program if it runs on NCCL, the backend of a cluster's devices.

    Raises:
        UserError: if it does not.
    """
    if (reason := proof.why_not("nccl")) is not None:
        raise UserError(f"{entry.name} cannot be timed on {cluster}: {reason}")
    return proof


def _require_few_ranks(entry: StrategyEntry, workload: Workload, cluster: str) -> None:
    """Refuse a simulation that would take minutes to prepare.

    Raises:
        UserError: for a plan with too many ranks along an axis, or another program with too many ops.
    """
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
    """Return a note if recomputation inside blocks saves no memory."""
    plan = workload.plan
    if not isinstance(plan, Plan) or (plan.recompute != "selective" and not plan.recompute_inside):
        return []
    if replace(workload, plan=replace(plan, recompute="none")).peak_bytes() > estimate.peak.bytes:
        return []
    if plan.recompute_inside:
        return [
            f"--recompute {plan.recompute} saves no memory here, because this model keeps nothing of it; leave it out"
        ]
    return [
        "--recompute selective saves no memory here, because attention scores are not stored anyway "
        "(they are with dropout, or without a fused kernel); leave it out"
    ]


def _ops_on_all_ranks(workload: Workload) -> int:
    program = workload.traced.program
    return sum(map(len, program.tapes)) * program.mesh.world // program.ranks


def _peak_as_json(peak: Peak, ranks: range) -> dict[str, Any]:
    return {
        "rank": peak.rank,
        "first_rank": ranks[0],
        "last_rank": ranks[-1],
        "bytes": peak.bytes,
        "by_category": peak.by_category,
        "cause": {"op": peak.op and peak.op.value, "layer": peak.layer, "part": peak.part, "text": peak.cause},
    }


def _parts_text(all: float, parts: Mapping[str, float]) -> str:
    """Return the parts of memory as text, largest first, in the total's unit. Parts that round to 0 are left out."""
    _, size = byte_unit(all)
    shares = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{part} {bytes / size:,.2f}" for part, bytes in shares if bytes >= 0.005 * size)


def _exposed_text(exposed: Mapping[tuple[str, str], float]) -> str:
    largest = [(key, share) for key, share in exposed.items() if share >= 0.0005][:4]
    return ", ".join(f"{kind.replace('_', '-')} on {axis} {share:.1%}" for (kind, axis), share in largest) or "none"


def _ranks_text(result: PricedStep) -> str:
    """Return the number of simulated ranks, and the identical ranks that each of them represents."""
    program, ranks = result.estimate.traced.program, result.workload.mesh.world
    if program.ranks == ranks:
        return counted(ranks, "rank")
    groups = [stands_for(program, row) for row in range(program.ranks)]
    stages = [
        f"rank {rank_of(program, row)} stands for ranks {group[0]}-{group[-1]}" for row, group in enumerate(groups)
    ]
    if len(stages) > NAMED_STAGES:
        stages[NAMED_STAGES - 1 : -1] = ["..."]
    return f"{program.ranks:,} of {ranks:,} ranks; {', '.join(stages)}"


def _check_text(result: PricedStep) -> str:
    if result.checked:
        return "passed"
    return f"skipped above {MOST_CHECKED:,} ops over all ranks; use fewer ranks, layers or microbatches to check"


def _print_ranks(console: Console, result: PricedStep) -> None:
    """Print the timeline of each rank, with its peak memory."""
    timeline, peaks = result.estimate.timeline(), result.estimate.peaks
    memory = [f"{bytes_text(peak.bytes):>11}" for peak in peaks]
    print_timeline(console, timeline, [("peak memory", memory)])
