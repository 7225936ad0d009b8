"""How much of a collective is hidden behind compute: both alone, then both at once."""

from __future__ import annotations

from statistics import median

import torch

from shardlab.measure.cases import Case, Team
from shardlab.measure.clock import Clock
from shardlab.measure.points import OverlapPoint
from shardlab.measure.world import World

WIDTH = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the product that is computed meanwhile."""

ROUNDS = 9


def overlap(world: World, team: Team, kind: str, case: Case) -> OverlapPoint | None:
    """Measure a collective alone, matrix products that take about as long, and both at once.

    The collective is started first, the products are computed, and then it is waited for, as an executor does.
    On a GPU it has a stream of its own. There is nothing to hide of a ping-pong, whose first half has to be waited for.
    """
    if kind == "send_recv":
        return None
    clock = Clock(world.device)
    width = WIDTH[world.device.type]
    a = torch.ones(width, width, device=world.device)
    into = torch.empty_like(a)

    def products(count: int) -> None:
        for _ in range(count):
            torch.mm(a, a, out=into)

    def time(calls: bool, count: int) -> float:
        times: list[float] = []
        for _ in range(ROUNDS):
            world.meet()
            clock.mark()
            wait = case.start() if calls else None
            products(count)
            if wait is not None:
                wait()
            clock.mark()
            times.append(world.mean(clock.gaps()[0]))
        return median(times)

    products(2)
    alone = time(True, 0)
    count = max(1, round(alone / time(False, 4) * 4))
    return OverlapPoint(kind, team.size, case.bytes, time(False, count), alone, time(True, count))
