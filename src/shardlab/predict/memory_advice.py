"""Advice on a step that does not fit into memory: by how much, what dominates, and which change helps."""

from __future__ import annotations

from dataclasses import replace

from shardlab.models import Blocks
from shardlab.predict.changes import Change, changes
from shardlab.predict.estimate import Estimate
from shardlab.predict.held import HeldMemory, held_by, held_memory
from shardlab.predict.workload import Workload
from shardlab.program import UserError
from shardlab.timeline.units import bytes_text

WORTH_SAYING = 0.99
"""A change that leaves more than this share of the peak is not named."""

ROOM = 0.98
"""Share of a device's memory that a change may take to be named: only some of its microbatches are traced."""


def require_memory(workload: Workload, estimate: Estimate, whole: Blocks | None = None) -> HeldMemory:
    """See that all that every rank holds fits on its device; say what the fullest holds.

    Args:
        whole: the model as a plan would run it, if the program runs another one.

    Raises:
        UserError: by how much it does not, what most of it is, and which change would make it fit.
    """
    peak, held = estimate.peak, held_memory(workload, estimate.peaks)
    if held.fits:
        return held
    most = max(peak.by_category, key=lambda category: peak.by_category[category])
    beyond = f", {bytes_text(held.needed - peak.bytes, 1)} of it beyond tensors" if held.needed > peak.bytes else ""
    needed, room = (bytes_text(bytes, 1) for bytes in (held.needed, held.room))
    if needed == room:
        needed, room = (bytes_text(bytes, 3) for bytes in (held.needed, held.room))
    raise UserError(
        f"rank {peak.rank} would hold {needed} of {room}{beyond}, "
        f"{bytes_text(held.needed - held.room, 1)} too much ({peak.cause}); most of it is {most}, "
        f"{bytes_text(peak.by_category[most], 1)}; {advice(workload, held, whole)}"
    )


def advice(workload: Workload, held: HeldMemory, whole: Blocks | None = None) -> str:
    """The first change of those tried that fits, or the one that leaves least; as they are without passes."""
    workload = replace(workload, passes="none", tiles=1)
    least: tuple[float, Change] | None = None
    for change in changes(workload, whole):
        try:
            bytes = held_by(change.short).needed
        except UserError:
            continue  # the model or the mesh does not allow it
        if bytes <= ROOM * held.room:
            return f"{change.flags} would fit, with {bytes_text(bytes, 1)}"
        if bytes < WORTH_SAYING * held.needed and (least is None or bytes < least[0]):
            least = bytes, change
    if least is None:
        return "nothing that was tried saves memory: take more devices, and a plan that shards over them"
    return (
        f"of what was tried {least[1].flags} takes least, {bytes_text(least[0], 1)}: take more devices, or larger ones"
    )
