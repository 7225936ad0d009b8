"""Times and memory of a schedule whose ranks each run their passes in a given order.

A pass is an integer, `(kind * stages + stage) * microbatches + microbatch`, with the kinds `FORWARD`, `INPUT` and
`WEIGHT`. `Passes` has tables of a problem by pass, and `Timing` has the times of one set of orders.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from shardlab.planner.schedule_search.problem import TOLERANCE, ScheduleProblem
from shardlab.strategies.schedules.actions import Action, Backward, BackwardInput, BackwardWeight, Forward
from shardlab.strategies.schedules.steps import Recv, Send, ShardedStep, Steps

FORWARD, INPUT, WEIGHT = range(3)

Orders = list[list[int]]
"""Passes of each rank, in order."""


class Passes:
    """Tables of all passes of a problem.

    Attributes:
        problem: the problem.
        count: number of passes.
        duration: time of each pass.
        rank: rank of each pass.
        needs: for each pass, the passes that it needs, each with the smallest time from its end to the start of the
            pass.
        readers: for each pass, the passes that need it, each with the same smallest time as in `needs`.
        memory: change of the rank's memory by each pass: `activation` for a forward pass, `kept_memory - activation`
            for an input half, and `-kept_memory` for a weight half (see `StageCosts`).
    """

    def __init__(self, problem: ScheduleProblem) -> None:
        self.problem = problem
        stages, m = problem.stages, problem.microbatches
        self.count = 3 * len(stages) * m
        times = [[getattr(stage, kind) for stage in stages] for kind in ("forward", "input", "weight")]
        changes = [
            [stage.activation for stage in stages],
            [stage.kept_memory - stage.activation for stage in stages],
            [-stage.kept_memory for stage in stages],
        ]
        self.duration = [time for kind in times for time in kind for _ in range(m)]
        self.memory = [change for kind in changes for change in kind for _ in range(m)]
        self.rank = [place for _ in range(3) for place in problem.ranks_of_stages for _ in range(m)]
        self.needs: list[tuple[tuple[int, float], ...]] = [self._needs_of(number) for number in range(self.count)]
        self.readers: list[list[tuple[int, float]]] = [[] for _ in range(self.count)]
        for number, needs in enumerate(self.needs):
            for need, lag in needs:
                self.readers[need].append((number, lag))

    def number(self, kind: int, stage: int, microbatch: int) -> int:
        """Return the number of a pass."""
        return (kind * len(self.problem.stages) + stage) * self.problem.microbatches + microbatch

    def parts(self, number: int) -> tuple[int, int, int]:
        """Return (kind, stage, microbatch) of a pass."""
        row, microbatch = divmod(number, self.problem.microbatches)
        kind, stage = divmod(row, len(self.problem.stages))
        return kind, stage, microbatch

    def _needs_of(self, number: int) -> tuple[tuple[int, float], ...]:
        kind, stage, microbatch = self.parts(number)
        places = self.problem.ranks_of_stages
        needs: list[tuple[int, float]] = []
        neighbour = stage - 1 if kind == FORWARD else stage + 1
        if kind == WEIGHT:
            return ((self.number(INPUT, stage, microbatch), 0.0),)
        if kind == INPUT:
            needs.append((self.number(FORWARD, stage, microbatch), 0.0))
        if 0 <= neighbour < len(places):
            lag = self.problem.message if places[neighbour] != places[stage] else 0.0
            needs.append((self.number(kind, neighbour, microbatch), lag))
        return tuple(needs)

    def orders_of(self, steps: Steps) -> tuple[Orders, frozenset[int]]:
        """Return the orders of a schedule, and the input halves that belong to whole backward passes."""
        kinds = {Forward: (FORWARD,), BackwardInput: (INPUT,), BackwardWeight: (WEIGHT,), Backward: (INPUT, WEIGHT)}
        actions = [[step for step in row if isinstance(step, Action)] for row in steps.of_ranks]
        orders = [
            [self.number(kind, action.stage, action.microbatch) for action in row for kind in kinds[type(action)]]
            for row in actions
        ]
        whole = (action for row in actions for action in row if isinstance(action, Backward))
        return orders, frozenset(self.number(INPUT, action.stage, action.microbatch) for action in whole)

    def peak_memory(self, order: Iterable[int]) -> float:
        """Return the peak memory of a rank that runs its passes in this order."""
        memory, used, peak = self.memory, 0.0, 0.0
        for number in order:
            used += memory[number]
            if used > peak:
                peak = used
        return peak

    def fits(self, orders: Orders) -> bool:
        """Return whether every rank stays within the memory limit."""
        limits = self.problem.limits
        return all(
            self.peak_memory(order) <= limit * (1 + TOLERANCE) for order, limit in zip(orders, limits, strict=True)
        )


@dataclass(frozen=True)
class Timing:
    """Times of a schedule.

    Attributes:
        passes: the tables of the problem.
        orders: passes of each rank, in order.
        end: end of each pass. Every pass starts as early as possible.
    """

    passes: Passes
    orders: Orders
    end: list[float]

    @property
    def time(self) -> float:
        """Time that the problem's objective minimizes: the time of the step, or the longest span of a rank."""
        ends = [self.end[order[-1]] for order in self.orders]
        if self.passes.problem.objective == "step":
            return max(ends)
        starts = self._latest_starts()
        return max(end - starts[order[0]] for order, end in zip(self.orders, ends, strict=True))

    def _latest_starts(self) -> list[float]:
        """Return, for each pass, the latest start with which no rank ends later."""
        passes, end = self.passes, self.end
        latest = [inf] * passes.count
        successors = {first: second for order in self.orders for first, second in pairwise(order)}
        place = {number: index for order in self.orders for index, number in enumerate(order)}
        for number in sorted(range(passes.count), key=lambda number: (end[number], place[number]), reverse=True):
            last = latest[successors[number]] if number in successors else end[number]
            for reader, lag in passes.readers[number]:
                last = min(last, latest[reader] - lag)
            latest[number] = last - passes.duration[number]
        return latest

    def _starts(self, order: list[int]) -> Iterator[float]:
        """Yield the starts of a rank's passes.

        They follow from the ends of needed passes. `end - duration` could be before these, because of rounding.
        """
        free = 0.0
        for number in order:
            yield max(free, *(self.end[need] + lag for need, lag in self.passes.needs[number]), 0.0)
            free = self.end[number]

    def idle_by_cause(self) -> dict[str, float]:
        """Return the shares of the step in which ranks do not compute, by cause, as means over the ranks.

        The causes are "before the first pass", "waiting for messages" (only their transfer), "waiting for passes" of
        other ranks, and "after the last pass".
        """
        passes = self.passes
        length = max(self.end)
        idle = dict.fromkeys(
            ("before the first pass", "waiting for messages", "waiting for passes", "after the last pass"), 0.0
        )
        for order in self.orders:
            free = None
            for number in order:
                start = self.end[number] - passes.duration[number]
                if free is None:
                    idle["before the first pass"] += start
                elif start > free:
                    ready = max((self.end[need] for need, lag in passes.needs[number] if lag), default=start)
                    transfer = min(start - free, max(0.0, start - ready))
                    idle["waiting for messages"] += transfer
                    idle["waiting for passes"] += start - free - transfer
                free = self.end[number]
            idle["after the last pass"] += length - (free or 0.0)
        return {cause: time / (length * len(self.orders)) for cause, time in idle.items()}

    def steps(self) -> Steps:
        """Return the schedule with its messages.

        A send follows the pass that computes its value. Its receive follows the pass that the receiving rank runs at
        that time. All messages are therefore in one global order, so no deadlock is possible.
        """
        passes = self.passes
        places = passes.problem.ranks_of_stages
        kinds = (Forward, BackwardInput, BackwardWeight) if passes.problem.has_halves else (Forward, Backward, None)
        steps: list[list[ShardedStep]] = [[] for _ in self.orders]
        # Starts and ends of passes. Ends come before starts at the same time, and starts follow the rank's order.
        begins = (
            (start, True, place, number)
            for order in self.orders
            for place, (number, start) in enumerate(zip(order, self._starts(order), strict=True))
        )
        ends = ((self.end[number], False, 0, number) for number in range(passes.number(WEIGHT, 0, 0)))
        for _, is_start, _, number in sorted([*begins, *ends]):
            rank = passes.rank[number]
            kind, stage, microbatch = passes.parts(number)
            reader = stage + (1 if kind == FORWARD else -1)
            if is_start:
                action = kinds[kind]
                if action is not None:
                    steps[rank].append(action(stage, microbatch))
            elif 0 <= reader < len(places) and places[reader] != rank:
                forward = kind == FORWARD
                steps[rank].append(Send(stage, microbatch, forward, places[reader]))
                steps[places[reader]].append(Recv(reader, microbatch, forward, rank))
        return Steps(tuple(map(tuple, steps)), passes.problem.microbatches, places)

    @property
    def peaks(self) -> list[float]:
        """Peak memory of each rank."""
        return [self.passes.peak_memory(order) for order in self.orders]


def timing_of(passes: Passes, orders: Orders, whole: Collection[int] = frozenset()) -> Timing | None:
    """Return the times of a schedule, or None if there is a deadlock.

    Args:
        passes: the problem's passes, as tables.
        orders: passes of each rank, in order.
        whole: input halves of whole (unsplit) backward passes, whose gradient is sent only when the weight half has
            ended, too.
    """
    duration, needs = passes.duration, passes.needs
    weight = passes.number(WEIGHT, 0, 0) - passes.number(INPUT, 0, 0)
    end = [-1.0] * passes.count
    places = [0] * len(orders)
    free = [0.0] * len(orders)
    remaining = passes.count
    while remaining:
        previous = remaining
        for rank, order in enumerate(orders):
            place, time, length = places[rank], free[rank], len(order)
            while place < length:
                number = order[place]
                start = time
                for need, lag in needs[number]:
                    ready = end[need]
                    if ready < 0:
                        break
                    ready += lag + (duration[need + weight] if need in whole and need + weight != number else 0.0)
                    if ready > start:
                        start = ready
                else:
                    time = start + duration[number]
                    end[number] = time
                    place += 1
                    continue
                break
            remaining -= place - places[rank]
            places[rank], free[rank] = place, time
        if remaining == previous:
            return None
    return Timing(passes, orders, end)
