"""Cost of a collective to a step of training: between computations, and beside them.

Alone, again and again, a collective finds its threads awake and a core for each. In a step the ranks compute between
two of them, and a rank that has what it waited for computes at once, on a core that the other one's communication may
still need: the system's scheduler decides who waits, often for milliseconds. So ranks are timed that do both.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

import torch

from shardlab.measure.cases import CollectiveCase, Team
from shardlab.measure.clock import Clock, batches, iterations_for
from shardlab.measure.points import OverlapPoint
from shardlab.measure.world import MeasuringRanks

WIDTH = {"cpu": 384, "cuda": 4096}
"""Rows and columns of the product that is computed: about a millisecond."""

LENGTHS = (1, 5, 2, 8, 3)
"""How many products (or times as many) come between two collectives: as those of layers, they are not all alike."""

BATCHES = 5


def overlap(
    world: MeasuringRanks, team: Team, kind: str, case: CollectiveCase, alone: float, seconds: float
) -> OverlapPoint:
    """Measure rounds of products of matrices alone, of products and then a collective that is waited for at once, and
    of products between its start and the wait, as an executor does both.

    On a GPU the collective has a stream of its own. Products take about as long as the collective, or longer: there has
    to be something to hide it behind.

    Args:
        alone: seconds of the collective, called again and again; between computations it takes no less.
        seconds: how long each of the three is measured for, about.
    """
    clock = Clock(world.device)
    width = WIDTH[world.device.type]
    a = torch.ones(width, width, device=world.device)
    into = torch.empty_like(a)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=into)

    def between(count: int) -> None:
        compute(count)
        case.start()()

    def beside(count: int) -> None:
        wait = case.start()
        compute(count)
        wait()

    def of_round(what: Callable[[int], None], cycles: int) -> float:
        world.meet()
        clock.mark()
        for count in counts * cycles:
            what(count)
        clock.mark()
        return world.mean(clock.gaps()[0]) / (len(counts) * cycles)

    compute(2)
    product = world.most(clock.seconds(lambda: compute(1), 5))
    usual = fmean(LENGTHS) * product
    counts = [length * max(1, round(alone / usual)) for length in LENGTHS]
    cycles = iterations_for(sum(counts) * product + len(counts) * alone, seconds, at_least=1)
    found = [[of_round(what, each) for what in (compute, between, beside)] for each in batches(cycles, BATCHES)]
    computing, waiting, together = (median(times) for times in zip(*found, strict=True))
    return OverlapPoint(kind, team.size, case.bytes, computing, max(alone, waiting - computing), together)
