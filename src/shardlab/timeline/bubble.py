"""The bubble of a pipeline: how much of its time the passes of the busiest rank do not fill."""

from __future__ import annotations

from shardlab.timeline.timeline import Timeline


def bubble(timeline: Timeline) -> float:
    """(cost - work) / cost, from 0 to 1 (Qi et al. 2023, arXiv 2401.10241, section 5.3).

    The cost is the longest time, over the ranks, from the start of the first pass to the end of the last; the work is
    all that the busiest rank computes meanwhile: m (F + B + W), where all ranks have as much to do. Updates and
    communication count only where passes wait for them.
    """
    passes = [[e for e in events if e.kind.value in _PASSES] for events in timeline.events]
    cost = max((max(e.end for e in each) - min(e.start for e in each) for each in passes if each), default=0.0)
    work = max((sum(e.end - e.start for e in each) for each in passes), default=0.0)
    return round((cost - work) / cost, 9) if cost else 0.0


_PASSES = frozenset({"forward", "recompute", "backward", "backward_input", "backward_weight"})
