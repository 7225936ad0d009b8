"""A checked tape over time: clocks, streams and memory, by unit costs or by any prices."""

from shardlab.timeline.bubble import bubble
from shardlab.timeline.costs import UNIT_COSTS, Costs
from shardlab.timeline.memory import live_memory
from shardlab.timeline.run import simulate
from shardlab.timeline.timeline import Event, Timeline
from shardlab.timeline.traffic import Traffic, traffic

__all__ = ["UNIT_COSTS", "Costs", "Event", "Timeline", "Traffic", "bubble", "live_memory", "simulate", "traffic"]
