"""Changes that save memory, as the flags that make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from shardlab.check import check
from shardlab.models import Blocks
from shardlab.predict.workload import Workload
from shardlab.program import Mesh, Sizes, UserError, trace
from shardlab.program.field_types import as_flags
from shardlab.strategies.grad_accum import grad_accum
from shardlab.strategies.plan import CUT_AXES, Plan
from shardlab.timeline.traced import Traced

MOST_MICROBATCHES = 1024
"""Microbatches of one data-parallel rank at most: nobody takes a batch in more."""

ALL_AT_ONCE = {"gpipe": "1f1b", "breadth-first": "interleaved-1f1b"}
"""Schedules that hold every microbatch at a time, and those that hold as many as the pipeline is deep."""


@dataclass(frozen=True)
class Change:
    """A workload that may take less memory.

    Attributes:
        flags: what is added to the command, after the flags that it has.
        workload: what they make.
    """

    flags: str
    workload: Workload

    @property
    def short(self) -> Workload:
        """This workload with enough microbatches for a schedule to be steady: later ones add nothing to the peak."""
        plan, microbatches = self.workload.plan, self.workload.microbatches
        if self.workload.trace is accumulating:
            return replace(self.workload, microbatches=min(4, microbatches))
        if isinstance(plan, Mesh) or not isinstance(plan.schedule, str) or "." in plan.schedule:
            return self.workload
        if plan.schedule in ALL_AT_ONCE:
            return self.workload
        each = microbatches // plan.data_ranks
        return replace(self.workload, microbatches=plan.data_ranks * min(each, 4 * plan.mesh.pp))


def accumulating(mesh: Mesh, sizes: Sizes, microbatches: int) -> Traced:
    """The built-in program that takes one microbatch after the other, on one device."""
    return check(trace(grad_accum, mesh, sizes, microbatches))


def changes(workload: Workload, whole: Blocks | None = None) -> Iterator[Change]:
    """List changes: those that cost little time first, then several at once, then other devices, then a smaller batch.

    Args:
        whole: the model as a plan would run it, if the program runs another one.
    """
    plan = workload.plan
    smaller = f"a smaller batch, --micro-batch-size 1 --microbatches {workload.microbatches},"
    if isinstance(plan, Plan):
        yield from _here(workload, plan)
        yield from _on_idle_devices(workload)
        if workload.micro_batch_size > 1:
            few = replace(workload, micro_batch_size=1)
            yield Change(smaller, few)
            yield from _prefixed(smaller.removesuffix(","), _of_plan(few, plan), ",")
        return
    few = _in_small_microbatches(workload)
    if few is not None and plan.world == 1:
        flags = _rows_flags(few)
        yield Change(f"grad-accum {flags}", replace(few, trace=accumulating))
    like_it = replace(workload, plan=Plan(plan), model=whole or workload.model, trace=None, columns=False)
    flags = as_flags(plan.used) or "--dp-shard 1"
    yield Change(f"a plan, {flags},", like_it)
    yield from _prefixed(f"a plan, {flags}", _here(like_it, Plan(plan)), ",")
    yield from _prefixed("a plan,", _on_idle_devices(like_it), ",")
    if workload.micro_batch_size > 1:
        yield Change(smaller, replace(workload, micro_batch_size=1))


def _here(workload: Workload, plan: Plan) -> Iterator[Change]:
    """Changes on the same mesh, with the same batch."""
    yield from _of_plan(workload, plan)
    if (few := _in_small_microbatches(workload)) is not None:
        flags = _rows_flags(few)
        if plan.mesh.pp > 1 and isinstance(plan.schedule, str) and plan.schedule in ALL_AT_ONCE:
            plan = replace(plan, schedule=ALL_AT_ONCE[plan.schedule])  # all at once, they take as much as before
            few, flags = replace(few, plan=plan), f"{flags} --schedule {plan.schedule}"
        yield Change(flags, few)
        yield from _prefixed(flags, _of_plan(few, plan))


def _on_idle_devices(workload: Workload) -> Iterator[Change]:
    """The devices that nobody uses as further data-parallel ranks, over which all is cut."""
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
    # with the flags of every axis, since the command wants all of them
    for change in _prefixed(flags, _of_plan(wider, plan)):
        yield Change(f"{change.flags}, which uses {devices} that are idle,", change.workload)
    if (few := _in_small_microbatches(wider)) is not None:
        for change in _prefixed(f"{as_flags(wide.used)} {_rows_flags(few)}", _of_plan(few, plan)):
            yield Change(f"{change.flags}, which uses {devices} that are idle,", change.workload)


def _of_plan(workload: Workload, plan: Plan) -> Iterator[Change]:
    """Try other plans: one change at a time, then the changes before it together with each that follows."""
    cheap: dict[str, Any] = {}
    if plan.mesh.tp > 1 and not plan.sequence_parallel:
        cheap["sequence_parallel"] = True
    if isinstance(plan.schedule, str) and plan.mesh.pp > 1 and plan.schedule in ALL_AT_ONCE:
        cheap["schedule"] = ALL_AT_ONCE[plan.schedule]
    if plan.shard_parameters and plan.reshard_after != "layer":
        cheap["reshard_after"] = "layer"
    sharding: dict[str, Any] = {}
    tried: list[dict[str, Any]] = [*({name: value} for name, value in cheap.items()), cheap]
    sizes = plan.mesh.sizes()
    more = [axis for axis in CUT_AXES if sizes[axis] > 1 and axis not in plan.shard_optimizer]
    axes = (*plan.shard_optimizer, *more)
    for field in ("shard_optimizer", "shard_gradients", "shard_parameters"):
        if axes and getattr(plan, field) != axes:
            sharding[field] = axes
            tried += [dict(sharding), {**cheap, **sharding}]
    words = {"none": ("selective", "full"), "selective": ("full",)}.get(str(plan.recompute), ())
    for recompute in words:
        change = {"recompute": recompute}
        tried += [change, {**change, **cheap}, {**change, **cheap, **sharding}]
    seen: list[dict[str, Any]] = [{}]
    for fields in tried:
        if fields in seen:
            continue
        seen.append(fields)
        try:
            yield Change(as_flags(fields), replace(workload, plan=replace(plan, **fields)))
        except UserError:
            continue  # some words of the plan do not go with it


def _in_small_microbatches(workload: Workload) -> Workload | None:
    """Cut the same batch into microbatches of as few sequences as do not make too many; None if it is so cut
    already."""
    most = MOST_MICROBATCHES * (workload.plan.data_ranks if isinstance(workload.plan, Plan) else 1)
    for times in range(min(workload.micro_batch_size, most // workload.microbatches), 1, -1):
        micro_batch_size, rest = divmod(workload.micro_batch_size, times)
        if not rest:
            return replace(workload, micro_batch_size=micro_batch_size, microbatches=workload.microbatches * times)
    return None


def _prefixed(prefix: str, changed: Iterator[Change], end: str = "") -> Iterator[Change]:
    for change in changed:
        yield Change(f"{prefix} {change.flags.removesuffix(',')}{end}", change.workload)


def _rows_flags(workload: Workload) -> str:
    return f"--micro-batch-size {workload.micro_batch_size} --microbatches {workload.microbatches}"
