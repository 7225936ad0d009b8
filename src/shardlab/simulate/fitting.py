"""What to change when a step does not fit into memory: a few changes are tried, by simulating memory alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardlab.program import UserError
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
    return f"of what was tried {said} takes least, {least / GIB:,.1f} GiB; take more devices"


def changes(workload: Workload) -> Iterator[tuple[str, Workload]]:
    """Changes that save memory, those that cost little time first, then several at once."""
    small = replace(workload, rows=1, microbatches=workload.microbatches * workload.rows)
    if isinstance(workload.plan, Plan):
        yield from _of_plan(workload)
        if workload.rows > 1:
            yield "rows 1", small
            for said, changed in _of_plan(workload):
                yield f"{said} with rows 1", replace(small, plan=changed.plan)
    elif workload.rows > 1:
        yield "rows 1", small


def _of_plan(workload: Workload) -> Iterator[tuple[str, Workload]]:
    plan = workload.plan
    assert isinstance(plan, Plan)
    sharded = workload
    if plan.mesh.tp > 1 and not plan.sequence_parallel:
        yield "sequence_parallel", workload.with_plan(sequence_parallel=True)
    if plan.mesh.dp_shard > 1:
        cut: dict[str, tuple[str, ...]] = {}
        for what in ("shard_optimizer", "shard_gradients", "shard_parameters"):
            if "dp_shard" not in getattr(plan, what) and not any(getattr(plan, name) for name in list(cut)):
                cut[what] = ("dp_shard",)
                sharded = workload.with_plan(**cut)
                yield " and ".join(f"{name} dp_shard" for name in cut), sharded
    if plan.recompute != "full":
        if plan.recompute == "none":
            yield "recompute selective", workload.with_plan(recompute="selective")
        yield "recompute full", workload.with_plan(recompute="full")
        if sharded is not workload:
            yield "all of shard_* dp_shard with recompute full", sharded.with_plan(recompute="full")


def _short(workload: Workload) -> Workload:
    """The same with no more microbatches than a pipeline holds at a time: what comes after adds nothing to the peak."""
    if not isinstance(workload.plan, Plan):
        return workload
    each = workload.microbatches // workload.plan.data_ranks
    return replace(workload, microbatches=workload.plan.data_ranks * min(each, 2 * workload.mesh.pp))
