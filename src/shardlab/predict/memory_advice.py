"""Advice on a step that does not fit into memory: by how much, what dominates, and which change helps."""

from __future__ import annotations

from shardlab.models import Blocks
from shardlab.predict.changes import Change, changes
from shardlab.predict.estimate import Estimate
from shardlab.predict.workload import Workload
from shardlab.program import UserError
from shardlab.timeline.units import bytes_text

WORTH_SAYING = 0.99
"""A change that leaves more than this share of the peak is not named."""

ROOM = 0.98
"""Share of a device's memory that a change may take to be named: only some of its microbatches are traced."""


def require_memory(workload: Workload, estimate: Estimate, whole: Blocks | None = None) -> None:
    """See that every rank's values fit on its device.

    Args:
        whole: the model as a plan would run it, if the program runs another one.

    Raises:
        UserError: by how much they do not, what most of it is, and which change would make it fit.
    """
    peak, room = estimate.peak, workload.cluster.device.memory
    if peak.bytes <= room:
        return
    most = max(peak.by_category, key=lambda category: peak.by_category[category])
    raise UserError(
        f"rank {peak.rank} would hold {bytes_text(peak.bytes, 1)} of {bytes_text(room, 1)}, "
        f"{bytes_text(peak.bytes - room, 1)} too much ({peak.cause}); most of it is {most}, "
        f"{bytes_text(peak.by_category[most], 1)}; {advice(workload, peak.bytes, room, whole)}"
    )


def advice(workload: Workload, peak: int, room: float, whole: Blocks | None = None) -> str:
    """The first change of those tried that fits, or the one that leaves least."""
    least: tuple[int, Change] | None = None
    for change in changes(workload, whole):
        try:
            bytes = change.short.peak_bytes()
        except UserError:
            continue  # the model or the mesh does not allow it
        if bytes <= ROOM * room:
            return f"{change.flags} would fit, with {bytes_text(bytes, 1)}"
        if bytes < WORTH_SAYING * peak and (least is None or bytes < least[0]):
            least = bytes, change
    if least is None:
        return "nothing that was tried saves memory: take more devices, and a plan that shards over them"
    return (
        f"of what was tried {least[1].flags} takes least, {bytes_text(least[0], 1)}: take more devices, or larger ones"
    )
