"""Pipeline schedules: each a short generator of actions, as in the figure of its paper."""

from shardlab.strategies.schedules.actions import Action, Backward, Forward, Schedule
from shardlab.strategies.schedules.breadth_first import breadth_first
from shardlab.strategies.schedules.interleaved import interleaved
from shardlab.strategies.schedules.one_f_one_b import one_f_one_b

__all__ = ["Action", "Backward", "Forward", "Schedule", "breadth_first", "interleaved", "one_f_one_b"]
