"""What to change when a step does not fit into memory: a few changes are tried, by simulating memory alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from shardlab.program import Mesh, UserError
from shardlab.simulate.estimate import Estimate
from shardlab.simulate.workload import Workload
from shardlab.strategies.plan import Plan

GIB = 2**30


def require_memory(workload: Workload, estimate: Estimate) -> None:
    """See that every rank's values fit on its device.

    Raises:
        UserError: by how much they do not, what most of it is, and which change would make it fit.
    """
    peak, room = estimate.peak, workload.cluster.device.memory
    if peak.bytes <= room:
        return
    most = max(peak.by_category, key=lambda category: peak.by_category[category])
    raise UserError(
        f"rank {peak.rank} would hold {peak.bytes / GIB:,.1f} GiB of {room / GIB:,.0f} GiB, "
        f"{(peak.bytes - room) / GIB:,.1f} GiB too much ({peak.cause}); most of it is {most}, "
        f"{peak.by_category[most] / GIB:,.1f} GiB; {advice(workload, room)}"
    )


def advice(workload: Workload, room: float) -> str:
    """The first change of those tried that fits, or the smallest there is."""
    tried: list[tuple[int, str]] = []
    for said, changed in changes(workload):
        try:
            tried.append((_short(changed).peak_bytes(), said))
        except UserError:
            continue  # the model or the mesh does not allow it
        if tried[-1][0] <= room:
            return f"{said} would fit, with {tried[-1][0] / GIB:,.1f} GiB"
    if not tried:
        return "take more devices, and a plan that shards over them"
    least, said = min(tried)
    return f"of what was tried {said} takes least, {least / GIB:,.1f} GiB: take more devices"


def changes(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Changes that save memory, as flags: those that cost little time first, then several at once."""
    plan = workload.plan
    if isinstance(plan, Mesh) and plan == Mesh(dp_shard=plan.dp_shard) and plan.dp_shard > 1:
        like_it = replace(workload, plan=Plan(plan))
        yield from ((f"a plan, --dp-shard {plan.dp_shard} {said},", other) for said, other in changes(like_it))
        return
    few_rows = replace(workload, rows=1, microbatches=workload.microbatches * workload.rows)
    flags = f"--rows 1 --microbatches {few_rows.microbatches}"
    if isinstance(plan, Plan):
        yield from _of_plan(workload, plan)
    if workload.rows > 1:
        yield flags, few_rows
        if isinstance(plan, Plan):
            yield from ((f"{said} {flags}", other) for said, other in _of_plan(few_rows, plan))


def _of_plan(workload: Workload, plan: Plan) -> Iterator[tuple[str, Workload]]:
    """The same with other plans."""

    def changed(**fields: Any) -> Workload:
        return replace(workload, plan=replace(plan, **fields))

    said, cut = "", dict[str, tuple[str, ...]]()
    if plan.mesh.tp > 1 and not plan.sequence_parallel:
        yield "--sequence-parallel", changed(sequence_parallel=True)
    if plan.mesh.dp_shard > 1:
        for field in ("shard_optimizer", "shard_gradients", "shard_parameters"):
            if not getattr(plan, field):
                cut[field] = ("dp_shard",)
                said += f" --{field.replace('_', '-')} dp_shard"
                yield said.strip(), changed(**cut)
    if plan.recompute == "none" and not plan.attention_apart and plan.mesh.ep == 1:
        yield "--recompute selective", changed(recompute="selective")
    if plan.recompute != "full":
        yield "--recompute full", changed(recompute="full")
        if cut:
            yield f"--recompute full{said}", changed(recompute="full", **cut)


def _short(workload: Workload) -> Workload:
    """The same with no more microbatches than a pipeline holds at a time: what comes after adds nothing to the peak."""
    if not isinstance(workload.plan, Plan):
        return workload
    each = workload.microbatches // workload.plan.data_ranks
    return replace(workload, microbatches=workload.plan.data_ranks * min(each, 2 * workload.mesh.pp))
