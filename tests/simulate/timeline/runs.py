"""What the tests of simulation share: a program's timeline, and its events by what they do."""

from __future__ import annotations

from shardlab.check import check
from shardlab.language import Mesh, OpKind, Sizes, Strategy, trace
from shardlab.simulate.timeline import PUZZLE_COSTS, Costs, Event, Timeline, simulate

SQUARE = 512 * 512
ROWS = 512 * 256
"""Elements of the puzzles' weight, and of one microbatch's activation."""


def run(
    strategy: Strategy, ranks: Mesh | int, layers: Sizes | int, microbatches: int, costs: Costs = PUZZLE_COSTS
) -> Timeline:
    return simulate(check(trace(strategy, ranks, layers, microbatches)), costs)


def events(timeline: Timeline, kind: OpKind, rank: int = 0) -> list[Event]:
    return [event for event in timeline.events[rank] if event.kind is kind]


def event(timeline: Timeline, kind: OpKind, layer: int, rank: int = 0) -> Event:
    """The only event of a kind at a layer of a rank."""
    (result,) = [event for event in events(timeline, kind, rank) if event.layer == layer]
    return result
