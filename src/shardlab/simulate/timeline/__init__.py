"""Simulation of a checked program: clocks, streams and memory, with teaching costs or other prices."""

from shardlab.simulate.timeline.bubble import bubble, schedule_bubble
from shardlab.simulate.timeline.costs import PUZZLE_COSTS, TEACHING_COSTS, Costs, TeachingCosts
from shardlab.simulate.timeline.memory import live_memory
from shardlab.simulate.timeline.run import simulate
from shardlab.simulate.timeline.timeline import Event, Timeline, Traffic, traffic

__all__ = ["PUZZLE_COSTS", "TEACHING_COSTS", "Costs", "TeachingCosts"]
__all__ += ["Event", "Timeline", "Traffic", "bubble", "live_memory", "schedule_bubble", "simulate", "traffic"]
