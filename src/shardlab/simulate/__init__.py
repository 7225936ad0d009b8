"""Clocks, streams and memory over a checked tape."""

from shardlab.simulate.bubble import bubble
from shardlab.simulate.costs import UNIT_COSTS, Costs
from shardlab.simulate.memory import live_memory
from shardlab.simulate.run import simulate
from shardlab.simulate.timeline import Event, Timeline
from shardlab.simulate.traffic import Traffic, traffic

__all__ = ["UNIT_COSTS", "Costs", "Event", "Timeline", "Traffic", "bubble", "live_memory", "simulate", "traffic"]
