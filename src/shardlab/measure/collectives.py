"""Timing of collectives in the manner of nccl-tests: check, warm up, call many times, average over ranks.

See github.com/NVIDIA/nccl-tests. Unlike in nccl-tests, the calls are timed in several batches, and the result is that
of the median batch, since the CPUs of a machine are rarely idle.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.execute.transport.collectives import messages_with
from shardlab.execute.transport.trial import CALLS, prepare
from shardlab.language import Reduction
from shardlab.measure.fits import CollectivePoint, OverlapPoint, append
from shardlab.measure.progress import Progress

BATCHES = 5

WARM_UP = 5
"""Number of calls before the timed ones."""


@dataclass(frozen=True)
class CollectiveBench:
    """Plan of a measurement of collectives: each kind at every size, in groups of every size.

    Attributes:
        kinds: names of collectives, from `fits.KINDS`.
        sizes: message sizes in bytes, ascending, counted as in `CollectivePoint.bytes`.
        groups: sizes of the groups of ranks. Each divides the number of all ranks.
        seconds: approximate time to measure a point.
        overlap: whether each kind except `send_recv` is also timed after matrix products and during them, which takes
            most of `seconds`.
    """

    kinds: tuple[str, ...]
    sizes: tuple[int, ...]
    groups: tuple[int, ...]
    seconds: float = 0.2
    overlap: bool = True

    @property
    def seconds_per_measurement(self) -> float:
        """Seconds for each measurement of a point: the collective alone, and three kinds of rounds, short and long."""
        return self.seconds / (1 + 3 * len(COMPUTE_SECONDS)) if self.overlap else self.seconds

    def plan(self) -> Iterator[tuple[int, str, int]]:
        """Yield (group, kind, size) of every point. The sizes of a kind are consecutive."""
        for group in self.groups:
            for kind in self.kinds:
                if kind == "send_recv" and group != 2:
                    continue
                for size in self.sizes[:1] if kind == "barrier" else self.sizes:
                    yield group, kind, size


def group_sizes(ranks: int) -> tuple[int, ...]:
    """Return the divisors of a number of ranks from 2 on: the sizes of groups in a mesh of these ranks.

    >>> group_sizes(8), group_sizes(6)
    ((2, 4, 8), (2, 3, 6))
    """
    return tuple(size for size in range(2, ranks + 1) if ranks % size == 0)


def measure_collectives(rank: int, device: torch.device, bench: CollectiveBench, file: Path) -> bool:
    """Run one rank's part of the measurement. Rank 0 writes each point into the file as soon as it is measured.

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
        point = measure_case(world, team, kind, case, bench)
        if rank == 0:
            append(file, point)
        for usual in COMPUTE_SECONDS if bench.overlap and kind != "send_recv" else ():
            in_step = measure_overlap(world, team, kind, case, point.seconds, usual, bench.seconds_per_measurement)
            if rank == 0:
                append(file, in_step)
        progress.step()
    progress.stop()
    return rank == 0


def measure_case(
    world: MeasuringRanks, team: Team, kind: str, case: CollectiveCase, bench: CollectiveBench
) -> CollectivePoint:
    """Measure one point. Every rank returns the same result."""
    clock = Clock(world.device)

    def call() -> None:
        case.start()()

    wrong = world.sum(case.wrong())
    for _ in range(WARM_UP):
        call()
    world.meet()
    iterations = iterations_for(world.max(clock.seconds(call, 3)), bench.seconds_per_measurement)
    times: list[float] = []
    for count in batches(iterations, BATCHES):
        world.meet()
        times.append(world.mean(clock.seconds(call, count)))
    calls = 2 if kind == "send_recv" else 1
    return CollectivePoint(kind, team.size, case.bytes, median(times) / calls, iterations, int(wrong))


PRODUCT = {"cpu": (16, 512), "cuda": (1024, 1024)}
"""Rows and columns of the timed matrix products. A product takes a small part of a round, and on a CPU core its ratio
of FLOPs to bytes is that of a layer with few tokens."""

LENGTHS = (1, 5, 2, 8, 3)
"""Relative durations of consecutive computations, which differ as the durations of layers do."""

COMPUTE_SECONDS = (0.5e-3, 5e-3)
"""Seconds of the computations between two collectives, in short and in long rounds. A short round represents half of a
small block under tensor parallelism, and a long round a whole block of a model."""


def measure_overlap(
    world: MeasuringRanks, team: Team, kind: str, case: CollectiveCase, alone: float, usual: float, seconds: float
) -> OverlapPoint:
    """Measure three kinds of rounds: matrix products alone, products followed by a collective, and products during a
    collective.

    Rounds are needed because the threads of a collective that is called repeatedly are awake, and each has a core. In a
    training step, the ranks compute between two collectives. A rank whose data has arrived computes at once, on a core
    that another rank's communication may still need. The operating system then decides which of them waits, often for
    milliseconds.

    On a GPU, the collective runs in a separate stream. Products take at least as long as the collective, so that they
    can hide it.

    Args:
        alone: seconds of the collective if it is called repeatedly. It takes at least as long between computations.
        usual: mean seconds of the products of a round, if that is more than `alone`.
        seconds: approximate time to measure each of the three kinds of rounds.
    """
    clock = Clock(world.device)
    rows, columns = PRODUCT[world.device.type]
    a, square = (torch.ones(size, columns, device=world.device) for size in (rows, columns))
    output = torch.empty_like(a)

    def compute(count: int) -> None:
        for _ in range(count):
            torch.mm(a, square, out=output)

    def alternate(count: int) -> None:
        compute(count)
        case.start()()

    def overlap(count: int) -> None:
        wait = case.start()
        compute(count)
        wait()

    def time_rounds(run: Callable[[int], None], cycles: int) -> float:
        world.meet()
        clock.mark()
        for count in counts * cycles:
            run(count)
        clock.mark()
        return world.mean(clock.gaps()[0]) / (len(counts) * cycles)

    compute(2)
    product = world.max(clock.seconds(lambda: compute(10), 5)) / 10
    usual = max(usual, alone)
    counts = [max(1, round(length / fmean(LENGTHS) * usual / product)) for length in LENGTHS]
    cycles = iterations_for(len(counts) * (usual + alone), seconds, at_least=1)
    measured = [
        [time_rounds(run, count) for run in (compute, alternate, overlap)] for count in batches(cycles, BATCHES)
    ]
    computing, sequential, overlapped = (median(times) for times in zip(*measured, strict=True))
    return OverlapPoint(kind, team.size, case.bytes, alone, computing, max(alone, sequential - computing), overlapped)


Wait = Callable[[], Any]
Start = Callable[[], Wait]


@dataclass(frozen=True)
class Team:
    """Ranks that take part in a collective.

    Attributes:
        group: process group of the ranks.
        ranks: numbers of the ranks in the world.
        index: position of this rank in the team.
        device: device of the tensors.
    """

    group: dist.ProcessGroup
    ranks: tuple[int, ...]
    index: int
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)

    def values(self, rank: int, elements: int) -> Tensor:
        """Return the input of the member `rank`, (elements,): small integers, whose sums are exact."""
        return _pattern(elements, self.device) * (rank + 1)

    def sum(self, elements: int) -> Tensor:
        """Return the sum of all members' inputs, (elements,)."""
        return _pattern(elements, self.device) * (self.size * (self.size + 1) // 2)


@dataclass(frozen=True)
class CollectiveCase:
    """Collective of one size, ready to be called repeatedly.

    Attributes:
        bytes: size of the whole value.
        start: function that starts a call, and returns the function that waits for it.
        result: tensor of this rank's result; None if it has none.
        expected: correct result of the first call.
        accumulator: tensor that every call overwrites, and whose values must not grow from call to call.
    """

    bytes: int
    start: Start
    result: Tensor | None
    expected: Tensor | None
    accumulator: Tensor | None = None

    def wrong(self) -> int:
        """Call once, and count the wrong elements of this rank's result."""
        self.start()()
        if self.result is None or self.expected is None:
            return 0
        wrong = int((self.result != self.expected).sum())
        if self.accumulator is not None:
            self.accumulator.zero_()
        return wrong


def make_case(kind: str, size: int, team: Team) -> CollectiveCase:
    """Return a collective on about `size` bytes of float32 numbers, which divide evenly among the team's ranks.

    The first rank of the team is the root, if the collective has one.
    """
    elements = max(1, size // 4 // team.size) * team.size
    if kind == "send_recv":
        return _send_recv(elements, team)
    call, is_root = CALLS[kind], team.index == 0
    whole = team.values(team.index, elements)
    piece = None
    if call.gives and (is_root or not call.root_gives):
        piece = whole if call.gives == "whole" else whole[: elements // team.size].clone()
    result, start = prepare(kind, team.group, piece, whole, 0, Reduction.SUM)
    expected = None if result is None else _expected(kind, elements, team)
    sums = piece if "reduce" in kind and call.in_place else None
    return CollectiveCase(4 * elements if call.receives else 0, lambda: start().wait, result, expected, sums)


def _expected(kind: str, elements: int, team: Team) -> Tensor:
    """Return the correct result on this rank. A rank whose input is a piece gives the first piece of its `values`."""
    if kind in ("broadcast", "scatter"):
        whole = team.values(0, elements)
    elif "reduce" in kind:
        whole = team.sum(elements)
    else:
        position = team.index if kind == "all_to_all" else 0
        whole = torch.cat([team.values(rank, elements).chunk(team.size)[position] for rank in range(team.size)])
    return whole.chunk(team.size)[team.index] if CALLS[kind].receives == "piece" else whole


def _pattern(elements: int, device: torch.device) -> Tensor:
    return torch.arange(elements, device=device).remainder_(7).add_(1).to(torch.float32)


def _send_recv(elements: int, team: Team) -> CollectiveCase:
    """Return a case in which the first rank sends to the second and back. It takes twice the time of one message."""
    assert team.size == 2, "a message has two ends"
    other = team.ranks[1 - team.index]
    x = team.values(0, elements) if team.index == 0 else torch.zeros(elements, device=team.device)
    messages = messages_with(other)
    first, second = (messages.send, messages.recv) if team.index == 0 else (messages.recv, messages.send)

    def ping_pong() -> Wait:
        first([x], other).wait()
        return second([x], other).wait

    return CollectiveCase(4 * elements, ping_pong, x, team.values(0, elements))


class MeasuringRanks:
    """One rank's view of the world: it splits ranks into process groups, and reduces numbers over all ranks.

    Args:
        rank: number of the rank.
        device: device of the rank.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.size = dist.get_world_size()
        self.device = device

    def team(self, size: int) -> Team:
        """Split the world into teams of `size` consecutive ranks, and return this rank's. Every rank calls this."""
        first = self.rank // size * size
        ranks = tuple(range(first, first + size))
        group = dist.group.WORLD if size == self.size else dist.new_group(list(ranks), use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return Team(group, ranks, self.rank - first, self.device)

    def max(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""
        return self._all_reduce(number, dist.ReduceOp.MAX)

    def sum(self, number: float) -> float:
        """Return the sum of all ranks' numbers."""
        return self._all_reduce(number, dist.ReduceOp.SUM)

    def mean(self, number: float) -> float:
        """Return the mean of all ranks' numbers."""
        return self.sum(number) / self.size

    def meet(self) -> None:
        """Wait until all ranks have called this and their devices are idle."""
        self.sum(0)
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _all_reduce(self, number: float, op: dist.ReduceOp.RedOpType) -> float:
        x = torch.tensor([number], dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=op)
        return float(x)


class Clock:
    """Clock that sets marks in a device's current stream, and returns the seconds between them.

    >>> clock = Clock(torch.device("cpu"))
    >>> clock.mark(); clock.mark()
    >>> len(clock.gaps())
    1
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Set a mark in the device's current stream."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def gaps(self) -> list[float]:
        """Return the seconds from each mark to the next, which are above 0.

        The call waits until the device has reached the last mark, and clears the marks.
        """
        marks, self._marks = self._marks, []
        if self._cuda:
            torch.cuda.synchronize()
            return [max(SHORTEST_SECONDS, first.elapsed_time(second) / 1000) for first, second in pairwise(marks)]
        return [max(SHORTEST_SECONDS, second - first) for first, second in pairwise(marks)]

    def seconds(self, run: Callable[[], Any], iterations: int) -> float:
        """Return the seconds of one call, as the mean over consecutive calls."""
        self.mark()
        for _ in range(iterations):
            run()
        self.mark()
        return self.gaps()[0] / iterations


def iterations_for(seconds: float, budget: float, at_least: int = 5, at_most: int = 2000) -> int:
    """Return the number of calls of `seconds` each that fill a budget of seconds, within the limits."""
    return max(at_least, min(at_most, int(budget / max(seconds, SHORTEST_SECONDS))))


def batches(iterations: int, count: int) -> Sequence[int]:
    """Split iterations into `count` batches, as evenly as possible. With fewer iterations there are fewer batches."""
    count = min(count, iterations)
    return [iterations // count + (i < iterations % count) for i in range(count)]
