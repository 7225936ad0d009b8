"""Advice on a workload: changes that make it fit into memory, and the figures that are assumed.

- `require_memory` refuses a step that does not fit into memory. `advice` names a change with which it would fit, or
  else the change that saves most. The candidates come from `changes`, each with the flags that request it.
- `assumed_figures` lists the figures of a prediction that no source gives and that were not fitted to runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardlab.check import check
from shardlab.common.fields import as_flags
from shardlab.common.text import bytes_text
from shardlab.language import Mesh, Sizes, UserError, trace
from shardlab.models import Blocks
from shardlab.simulate.hardware.device import Figure
from shardlab.simulate.predict.estimate import Peak
from shardlab.simulate.predict.limits import broken_limit
from shardlab.simulate.predict.memory import DeviceMemory, device_memory
from shardlab.simulate.predict.workload import Workload
from shardlab.simulate.timeline.prices import Traced
from shardlab.strategies.grad_accum import grad_accum
from shardlab.strategies.plan.plan import CUT_AXES, Plan

MOST_MICROBATCHES = 1024
"""Largest number of microbatches of a data-parallel rank that the advice suggests."""

ALL_AT_ONCE = {"gpipe": "1f1b", "breadth-first": "interleaved-1f1b"}
"""Schedules that hold all microbatches at once, each with one that holds only as many as the pipeline has stages."""


@dataclass(frozen=True)
class Change:
    """Change of a workload that may save memory.

    Attributes:
        flags: flags to add to the command.
        workload: the workload with this change.
    """

    flags: str
    workload: Workload

    @property
    def short(self) -> Workload:
        """The workload with just enough microbatches to reach the peak; later ones do not raise it."""
        plan, microbatches = self.workload.plan, self.workload.microbatches
        if self.workload.trace is accumulating:
            return replace(self.workload, microbatches=min(4, microbatches))
        if isinstance(plan, Mesh) or not isinstance(plan.schedule, str) or "." in plan.schedule:
            return self.workload
        if plan.schedule in ALL_AT_ONCE:
            return self.workload
        per_rank = microbatches // plan.data_ranks
        return replace(self.workload, microbatches=plan.data_ranks * min(per_rank, 4 * plan.mesh.pp))


def accumulating(mesh: Mesh, sizes: Sizes, microbatches: int) -> Traced:
    """Trace the built-in program that runs one microbatch after the other on one device."""
    return check(trace(grad_accum, mesh, sizes, microbatches))


def changes(workload: Workload, whole: Blocks | None = None) -> Iterator[Change]:
    """Yield changes that may save memory.

    Changes that cost little time come first, then combinations, then more devices, then a smaller batch.

    Args:
        workload: the workload to change.
        whole: the model of the suggested plans (None: the workload's model).
    """
    plan = workload.plan
    flags_of_smaller = f"a smaller batch, --micro-batch-size 1 --microbatches {workload.microbatches},"
    if isinstance(plan, Plan):
        yield from _on_same_mesh(workload, plan)
        yield from _on_idle_devices(workload)
        if workload.micro_batch_size > 1:
            smaller = replace(workload, micro_batch_size=1)
            yield Change(flags_of_smaller, smaller)
            yield from _prefixed(flags_of_smaller.removesuffix(","), _of_plan(smaller, plan), ",")
        return
    smaller = _in_small_microbatches(workload)
    if smaller is not None and plan.world == 1:
        flags = _rows_flags(smaller)
        yield Change(f"grad-accum {flags}", replace(smaller, trace=accumulating))
    like_it = replace(workload, plan=Plan(plan), model=whole or workload.model, trace=None, columns=False)
    flags = as_flags(plan.used) or "--dp-shard 1"
    yield Change(f"a plan, {flags},", like_it)
    yield from _prefixed(f"a plan, {flags}", _on_same_mesh(like_it, Plan(plan)), ",")
    yield from _prefixed("a plan,", _on_idle_devices(like_it), ",")
    if workload.micro_batch_size > 1:
        yield Change(flags_of_smaller, replace(workload, micro_batch_size=1))


def _on_same_mesh(workload: Workload, plan: Plan) -> Iterator[Change]:
    """Yield changes on the same mesh, with the same batch."""
    yield from _of_plan(workload, plan)
    if (smaller := _in_small_microbatches(workload)) is not None:
        flags = _rows_flags(smaller)
        if plan.mesh.pp > 1 and isinstance(plan.schedule, str) and plan.schedule in ALL_AT_ONCE:
            plan = replace(plan, schedule=ALL_AT_ONCE[plan.schedule])  # the schedule would hold them all at once
            smaller, flags = replace(smaller, plan=plan), f"{flags} --schedule {plan.schedule}"
        yield Change(flags, smaller)
        yield from _prefixed(flags, _of_plan(smaller, plan))


def _on_idle_devices(workload: Workload) -> Iterator[Change]:
    """Yield changes that use idle devices as further data-parallel ranks and shard over them."""
    mesh, spare = workload.mesh, workload.cluster.size // workload.mesh.world
    if spare < 2:
        return
    assert isinstance(workload.plan, Plan)
    wide = replace(mesh, dp_shard=mesh.dp_shard * spare)
    plan = replace(workload.plan, mesh=wide)
    shares = plan.data_ranks
    wider = replace(workload, plan=plan, microbatches=-(-workload.microbatches // shares) * shares)
    idle = workload.cluster.size - mesh.world
    devices = f"the {idle} devices" if idle > 1 else "the device"
    flags = f"{as_flags(wide.used)} --microbatches {wider.microbatches}"
    # with the flags of every axis, all of which the command needs
    for change in _prefixed(flags, _of_plan(wider, plan)):
        yield Change(f"{change.flags}, which uses {devices} that are idle,", change.workload)
    if (smaller := _in_small_microbatches(wider)) is not None:
        for change in _prefixed(f"{as_flags(wide.used)} {_rows_flags(smaller)}", _of_plan(smaller, plan)):
            yield Change(f"{change.flags}, which uses {devices} that are idle,", change.workload)


def _of_plan(workload: Workload, plan: Plan) -> Iterator[Change]:
    """Yield changes of the plan: single fields, then each combined with the cheaper changes before it."""
    cheap: dict[str, Any] = {}
    if plan.mesh.tp > 1 and not plan.sequence_parallel:
        cheap["sequence_parallel"] = True
    if isinstance(plan.schedule, str) and plan.mesh.pp > 1 and plan.schedule in ALL_AT_ONCE:
        cheap["schedule"] = ALL_AT_ONCE[plan.schedule]
    if plan.shard_parameters and plan.reshard_after != "layer":
        cheap["reshard_after"] = "layer"
    sharding: dict[str, Any] = {}
    candidates: list[dict[str, Any]] = [*({name: value} for name, value in cheap.items()), cheap]
    sizes = plan.mesh.sizes()
    unused_axes = [axis for axis in CUT_AXES if sizes[axis] > 1 and axis not in plan.shard_optimizer]
    axes = (*plan.shard_optimizer, *unused_axes)
    for field in ("shard_optimizer", "shard_gradients", "shard_parameters"):
        if axes and getattr(plan, field) != axes:
            sharding[field] = axes
            candidates += [dict(sharding), {**cheap, **sharding}]
    words = {"none": ("selective", "full"), "selective": ("full",), "per-op": ("full",)}.get(str(plan.recompute), ())
    for recompute in words:
        change = {"recompute": recompute}
        candidates += [change, {**change, **cheap}, {**change, **cheap, **sharding}]
    yielded: list[dict[str, Any]] = [{}]
    for fields in candidates:
        if fields in yielded:
            continue
        yielded.append(fields)
        try:
            yield Change(as_flags(fields), replace(workload, plan=replace(plan, **fields)))
        except UserError:
            continue  # another field of the plan excludes this one


def _in_small_microbatches(workload: Workload) -> Workload | None:
    """Return the workload with the same batch in the smallest allowed microbatches (None: they cannot be smaller)."""
    max_microbatches = MOST_MICROBATCHES * (workload.plan.data_ranks if isinstance(workload.plan, Plan) else 1)
    for times in range(min(workload.micro_batch_size, max_microbatches // workload.microbatches), 1, -1):
        micro_batch_size, rest = divmod(workload.micro_batch_size, times)
        if not rest:
            return replace(workload, micro_batch_size=micro_batch_size, microbatches=workload.microbatches * times)
    return None


def _prefixed(prefix: str, changed: Iterator[Change], end: str = "") -> Iterator[Change]:
    for change in changed:
        yield Change(f"{prefix} {change.flags.removesuffix(',')}{end}", change.workload)


def _rows_flags(workload: Workload) -> str:
    return f"--micro-batch-size {workload.micro_batch_size} --microbatches {workload.microbatches}"


WORTH_SAYING = 0.99
"""A change that leaves more than this share of the peak is not suggested."""

ROOM = 0.98
"""Largest share of a device's memory for a suggested change: the estimate traces only some of its microbatches."""


def require_memory(workload: Workload, peaks: Sequence[Peak], whole: Blocks | None = None) -> DeviceMemory:
    """Return the memory of the fullest device, and raise an error if it does not fit.

    Args:
        workload: the workload.
        peaks: the peak of each rank that was replayed.
        whole: the model of the suggested plans (None: the workload's model).

    Raises:
        UserError: if it does not fit, with the excess, the largest category, and a change that would make it fit.
    """
    peak, memory = max(peaks, key=lambda peak: peak.bytes), device_memory(workload, peaks)
    if memory.fits:
        return memory
    largest_category = max(peak.by_category, key=lambda category: peak.by_category[category])
    extra = f" ({bytes_text(memory.needed - peak.bytes, 1)} of it not tensors)" if memory.needed > peak.bytes else ""
    needed, capacity = (bytes_text(bytes, 1) for bytes in (memory.needed, memory.capacity))
    if needed == capacity:
        needed, capacity = (bytes_text(bytes, 3) for bytes in (memory.needed, memory.capacity))
    raise UserError(
        f"rank {peak.rank} would need {needed}{extra} but has {capacity}: "
        f"{bytes_text(memory.needed - memory.capacity, 1)} too much ({peak.cause}); most of it is {largest_category}, "
        f"{bytes_text(peak.by_category[largest_category], 1)}; {advice(workload, memory, whole)}"
    )


def advice(workload: Workload, memory: DeviceMemory, whole: Blocks | None = None) -> str:
    """Return as text the first change that makes the workload fit without passes, or else the one that saves most."""
    workload = replace(workload, passes="none", tiles=1)
    smallest: tuple[float, Change] | None = None
    for change in changes(workload, whole):
        if broken_limit(change.workload):
            continue
        try:
            bytes = device_memory(change.short).needed
        except UserError:
            continue  # the model or the mesh does not allow it
        if bytes <= ROOM * memory.capacity:
            return f"{change.flags} would fit, with {bytes_text(bytes, 1)}"
        if bytes < WORTH_SAYING * memory.needed and (smallest is None or bytes < smallest[0]):
            smallest = bytes, change
    if smallest is None:
        return "nothing that was tried saves memory: take more devices, and a plan that shards over them"
    return (
        f"of what was tried {smallest[1].flags} takes least, {bytes_text(smallest[0], 1)}: "
        "take more devices, or larger ones"
    )


def assumed_figures(workload: Workload) -> dict[str, Figure]:
    """Return the assumed figures that a step uses, by name, such as "h100 attention.flash2".

    A figure of the recipe, the device or a link is assumed if no source gives it and it was not fitted to runs.
    """
    return {name: figure for name, figure in _used(workload) if figure.assumed}


def _used(workload: Workload) -> Iterator[tuple[str, Figure]]:
    recipe, cluster, ranks = workload.recipe, workload.cluster, workload.mesh.world
    for name, figure in recipe.figures.items():
        group, _, field = name.partition(".")
        communicates = group != "overlap" or ranks > 1
        of_allocator = name in ("memory.reserved", "memory.kept_when_full", "memory.context_bytes")
        if (
            communicates
            and not (of_allocator and cluster.on_cpu)
            and getattr(getattr(recipe, group), field) == figure.value
        ):
            yield f"{recipe.name} {name}", figure
    if cluster.profile is not None:
        return
    efficiency = cluster.device.efficiency
    used = {f"matmul.{workload.precision.compute}", f"attention.{recipe.kernels.attention}"}
    for name, figure in efficiency.figures.items():
        if name in used or "." not in name:
            yield f"{cluster.device.name} {name}", figure
    links = [cluster.intra_node] * (ranks > 1 < cluster.per_node) + [cluster.inter_node] * (ranks > cluster.per_node)
    for link in links:
        for name, figure in link.figures.items():
            if getattr(link, name) == figure.value:
                yield f"{link.name} {name}", figure
