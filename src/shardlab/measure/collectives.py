"""Timing collectives in the manner of nccl-tests: check, warm up, call many times, average over ranks.

(github.com/NVIDIA/nccl-tests.) Unlike there, the calls are timed in several batches and the median batch counts, since
a machine without devices of its own is seldom quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import torch

from shardlab.measure.cases import CollectiveCase, Team, make_case
from shardlab.measure.clock import Clock, batches, iterations_for
from shardlab.measure.points import CollectivePoint, OverlapPoint, append
from shardlab.measure.progress import Progress
from shardlab.measure.world import MeasuringRanks

BATCHES = 5

WARM_UP = 5
"""Calls before those that are timed."""


@dataclass(frozen=True)
class CollectiveBench:
    """Collectives to be timed: each kind at every size, among groups of every size.

    Attributes:
        kinds: names of collectives, of `points.KINDS`.
        sizes: bytes of the whole value, ascending.
        groups: ranks of the groups that meet; each number divides that of all ranks.
        seconds: time for each point in all, about.
        overlap: whether each but messages is timed between and beside computations, too, for most of that time.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    seconds: float = 0.2
    overlap: bool = True

    @property
    def each(self) -> float:
        """Seconds of each way in which a point is timed: called alone, and in three kinds of round, short and long (see
        `overlap`)."""
        return self.seconds / (1 + 3 * len(USUAL)) if self.overlap else self.seconds

    def plan(self) -> Iterator[tuple[int, str, int]]:
        """(group, kind, size) of every point: all sizes of a kind together."""
        for group in self.groups:
            for kind in self.kinds:
                if kind == "send_recv" and group != 2:
                    continue
                for size in self.sizes[:1] if kind == "barrier" else self.sizes:
                    yield group, kind, size


def group_sizes(ranks: int) -> tuple[int, ...]:
    """The divisors of a number of ranks from 2 on: sizes of groups that a mesh of so many can have.

    >>> group_sizes(8), group_sizes(6)
    ((2, 4, 8), (2, 3, 6))
    """
    return tuple(size for size in range(2, ranks + 1) if ranks % size == 0)


def measure_collectives(rank: int, device: torch.device, bench: CollectiveBench, file: Path) -> bool:
    """Run one rank's part of the measurement; rank 0 writes every point into the file at once.

    Returns:
        Whether this is rank 0.
    """
    world = MeasuringRanks(rank, device)
    plan = list(bench.plan())
    progress = Progress(len(plan), show=rank == 0)
    teams = {size: world.team(size) for size in bench.groups}
    for group, kind, size in plan:
        progress.say(f"{kind} of {group} ranks, {size:,} bytes")
        team = teams[group]
        case = make_case(kind, size, team)
        point = time_case(world, team, kind, case, bench)
        if rank == 0:
            append(file, point)
        for usual in USUAL if bench.overlap and kind != "send_recv" else ():
            in_step = overlap(world, team, kind, case, point.seconds, usual, bench.each)
            if rank == 0:
                append(file, in_step)
        progress.step()
    progress.stop()
    return rank == 0


def time_case(
    world: MeasuringRanks, team: Team, kind: str, case: CollectiveCase, bench: CollectiveBench
) -> CollectivePoint:
    """Measure one point; every rank gives the same."""
    clock = Clock(world.device)

    def call() -> None:
        case.start()()

    wrong = world.sum(case.wrong())
    for _ in range(WARM_UP):
        call()
    world.meet()
    iterations = iterations_for(world.most(clock.seconds(call, 3)), bench.each)
    times: list[float] = []
    for count in batches(iterations, BATCHES):
        world.meet()
        times.append(world.mean(clock.seconds(call, count)))
    calls = 2 if kind == "send_recv" else 1
    return CollectivePoint(kind, team.size, case.bytes, median(times) / calls, iterations, int(wrong))


PRODUCT = {"cpu": (16, 512), "cuda": (1024, 1024)}
"""Rows and columns of what is multiplied by a square matrix: a small part of a round, and on a core as much memory for
its arithmetic as a layer of few tokens moves."""

LENGTHS = (1, 5, 2, 8, 3)
"""How the computations of rounds go on: as those of layers, they are not all as long."""

USUAL = (0.5e-3, 5e-3)
"""Seconds of the computations between two collectives, of short rounds and of long ones: between the halves of a small
block under tensor parallelism, and between the blocks of a model."""


def overlap(
    world: MeasuringRanks, team: Team, kind: str, case: CollectiveCase, alone: float, usual: float, seconds: float
) -> OverlapPoint:
    """Measure rounds of products of matrices alone, of products and then a collective that is waited for at once, and
    of products between its start and the wait, as an executor does both.

    Alone, again and again, a collective finds its threads awake and a core for each. In a step the ranks compute
    between two of them, and a rank that has what it waited for computes at once, on a core that the other one's
    communication may still need: the system's scheduler decides who waits, often for milliseconds.

    On a GPU the collective has a stream of its own. Products take as long as the collective, or longer: there has to be
    something to hide it behind.

    Args:
        alone: seconds of the collective, called again and again; between computations it takes no less.
        usual: seconds of the products of a round, if they are no less than that.
        seconds: how long each of the three is measured for, about.
    """
    clock = Clock(world.device)
    rows, columns = PRODUCT[world.device.type]
    a, square = (torch.ones(each, columns, device=world.device) for each in (rows, columns))
    into = torch.empty_like(a)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, square, out=into)

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
    product = world.most(clock.seconds(lambda: compute(10), 5)) / 10
    usual = max(usual, alone)
    counts = [max(1, round(length / fmean(LENGTHS) * usual / product)) for length in LENGTHS]
    cycles = iterations_for(len(counts) * (usual + alone), seconds, at_least=1)
    found = [[of_round(what, each) for what in (compute, between, beside)] for each in batches(cycles, BATCHES)]
    computing, waiting, together = (median(times) for times in zip(*found, strict=True))
    return OverlapPoint(kind, team.size, case.bytes, alone, computing, max(alone, waiting - computing), together)
