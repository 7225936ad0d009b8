"""Pipeline schedules: each a short generator of actions, as in the figure of its paper."""

from shardlab.strategies.schedules.actions import (
    Action,
    Actions,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Placement,
    Schedule,
    loop,
    vee,
)
from shardlab.strategies.schedules.breadth_first import breadth_first
from shardlab.strategies.schedules.interleaved import interleaved
from shardlab.strategies.schedules.one_f_one_b import one_f_one_b

SCHEDULES = {
    schedule.name: schedule
    for schedule in (
        Schedule("1f1b", one_f_one_b, "arXiv 2104.04473, fig. 4, top"),
        Schedule("interleaved-1f1b", interleaved, "arXiv 2104.04473, fig. 4, bottom", stages_per_rank=None),
        Schedule("breadth-first", breadth_first, "arXiv 2211.05953, fig. 4", stages_per_rank=None),
    )
}
"""Every built-in schedule by name."""

__all__ = [
    "SCHEDULES",
    "Action",
    "Actions",
    "Backward",
    "BackwardInput",
    "BackwardWeight",
    "Forward",
    "Placement",
    "Schedule",
    "loop",
    "vee",
]
