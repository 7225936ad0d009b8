"""Local search over schedules, which changes the order of the forward passes and input halves of each rank.

Only the order of these passes is searched. `fill` inserts the weight halves, for which no other rank waits, into gaps
of a rank, and before a forward pass that lacks memory. `improve` proposes changes on the critical path and accepts them
by late acceptance (Burke and Bykov 2017, European Journal of Operational Research 258(1)): a change is accepted if the
changed schedule is no worse than the current one, or than the one that was current `HISTORY` proposals ago.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from random import Random

from shardlab.planner.schedule_search.problem import TOLERANCE
from shardlab.planner.schedule_search.timing import INPUT, WEIGHT, Orders, Passes, Timing

HISTORY = 30
"""Number of proposals for which late acceptance looks back."""

GAPS = (1.0, 0.5, 0.01)
"""Values of `gap` to try (see `Skeleton`)."""


@dataclass(frozen=True)
class Skeleton:
    """Schedule without its weight halves.

    Attributes:
        orders: forward passes and input halves of each rank, in order.
        gap: shortest gap in which a weight half runs, as a share of the half's time.
    """

    orders: Orders
    gap: float


def skeleton_of(passes: Passes, orders: Orders, gap: float) -> Skeleton:
    """Return a schedule without its weight halves."""
    weights = passes.number(WEIGHT, 0, 0)
    return Skeleton([[number for number in order if number < weights] for order in orders], gap)


def fill(passes: Passes, skeleton: Skeleton, maximum: float = inf) -> Timing | None:
    """Return a schedule with its weight halves, or None if there is a deadlock or a pass does not fit into memory.

    Each rank runs its passes in order, as early as they can start. A weight half runs in the first gap that is long
    enough (see `Skeleton`), or before a pass that needs its memory. All others run at the end.

    Args:
        passes: tables of the problem.
        skeleton: the schedule without its weight halves.
        maximum: memory limit of every rank, in addition to the limits of the problem.
    """
    duration, needs, memory, gap = passes.duration, passes.needs, passes.memory, skeleton.gap
    limits = [min(limit, maximum) * (1 + TOLERANCE) for limit in passes.problem.limits]
    ranks = len(skeleton.orders)
    shift = passes.number(WEIGHT, 0, 0) - passes.number(INPUT, 0, 0)
    inputs = passes.number(INPUT, 0, 0)
    end = [-1.0] * passes.count
    places, free, used = [0] * ranks, [0.0] * ranks, [0.0] * ranks
    orders: Orders = [[] for _ in range(ranks)]
    pending: list[deque[int]] = [deque() for _ in range(ranks)]
    remaining = sum(map(len, skeleton.orders))
    while remaining:
        previous = remaining
        for rank, order in enumerate(skeleton.orders):
            place, time, rows, weights, limit = places[rank], free[rank], orders[rank], pending[rank], limits[rank]
            while place < len(order):
                number = order[place]
                start = time
                for need, lag in needs[number]:
                    ready = end[need]
                    if ready < 0:
                        break
                    if ready + lag > start:
                        start = ready + lag
                else:
                    change = memory[number]
                    while weights and (used[rank] + change > limit or start - time >= gap * duration[weights[0]]):
                        weight = weights.popleft()
                        time += duration[weight]
                        end[weight] = time
                        used[rank] += memory[weight]
                        rows.append(weight)
                    used[rank] += change
                    if used[rank] > limit:
                        return None
                    time = max(start, time) + duration[number]
                    end[number] = time
                    rows.append(number)
                    if number >= inputs:
                        weights.append(number + shift)
                    place += 1
                    continue
                break
            remaining -= place - places[rank]
            places[rank], free[rank] = place, time
        if remaining == previous:
            return None
    for rank, weights in enumerate(pending):
        time = free[rank]
        for weight in weights:
            time += duration[weight]
            end[weight] = time
        orders[rank] += weights
    return Timing(passes, orders, end)


def with_less_memory(timing: Timing) -> Timing:
    """Return a schedule that takes no longer than `timing`, with less memory if moving weight halves achieves it."""
    passes, best = timing.passes, timing
    for gap in GAPS:
        skeleton = skeleton_of(passes, timing.orders, gap)
        upper, lower = max(best.peaks), 0.0
        while upper - lower > 0.01 * upper:
            limit = (upper + lower) / 2
            filled = fill(passes, skeleton, limit)
            if filled is not None and filled.time <= timing.time * (1 + TOLERANCE):
                best, upper = filled, max(filled.peaks)
            else:
                lower = limit
    return best


def improve(passes: Passes, starts: list[Skeleton], random: Random, stop: Callable[[float], bool]) -> Timing:
    """Return the best schedule that the local search finds from the starts.

    Args:
        passes: tables of the problem.
        starts: skeletons that can be filled, the best first.
        random: source of the proposals.
        stop: function that takes the best time so far and returns whether to stop. It is called before each proposal.
    """
    search = _Search(passes, starts, random)
    with suppress(KeyboardInterrupt):
        while not stop(search.best.time):
            search.propose()
    return search.best


class _Search:
    def __init__(self, passes: Passes, starts: list[Skeleton], random: Random) -> None:
        self.passes, self.random, self.starts = passes, random, starts
        self.best: Timing = _filled(passes, starts[0])
        self.idle = 0
        self._start_from(0)

    def _start_from(self, number: int) -> None:
        self.start = number
        self.current = self.starts[number]
        self.timing = _filled(self.passes, self.current)
        self.score = _score(self.timing)
        self.history = deque([self.score] * HISTORY, HISTORY)
        self.local = self.score

    def propose(self) -> None:
        """Propose one change, and accept it or not."""
        if self.idle > 400:  # no improvement from here: continue with the next start
            self.idle = 0
            self._start_from((self.start + 1) % len(self.starts))
        skeleton = self._change()
        timing = fill(self.passes, skeleton) if skeleton is not None else None
        self.idle += 1
        if timing is None or skeleton is None:
            return
        score = _score(timing)
        if score <= max(self.score, self.history[0]):
            self.current, self.timing, self.score = skeleton, timing, score
            if score < self.local:
                self.local, self.idle = score, 0
            if timing.time < self.best.time * (1 - TOLERANCE):
                self.best = timing
        self.history.append(self.score)

    def _change(self) -> Skeleton | None:
        """Return a changed skeleton (None: the change that was drawn is not possible).

        The change is another `gap`, a pass that runs up to four places earlier, or an exchange of two adjacent passes
        that is repeated at later places where passes of the same kinds and stages are adjacent.
        """
        random, current = self.random, self.current
        kind = random.random()
        if kind < 0.03:
            return Skeleton(current.orders, random.choice(GAPS))
        rank, place = self._critical_place() if kind < 0.8 else self._any_place()
        order = current.orders[rank]
        if not 0 < place < len(order) or not self._may_swap(order[place - 1], order[place]):
            return None
        changed = order.copy()
        if kind < 0.5 or 0.8 <= kind < 0.85:
            distance = random.choice((1, 1, 1, 2, 4))
            target = place
            while target and place - target < distance and self._may_swap(order[target - 1], order[place]):
                target -= 1
            changed.insert(target, changed.pop(place))
        else:  # the same exchange wherever it is possible later
            pair = self._form(order[place - 1]), self._form(order[place])
            position = place
            last = len(order) if random.random() < 0.7 else place + random.randrange(2, 40)
            while position < min(last, len(order)):
                if (self._form(changed[position - 1]), self._form(changed[position])) == pair and self._may_swap(
                    changed[position - 1], changed[position]
                ):
                    changed[position - 1], changed[position] = changed[position], changed[position - 1]
                    position += 1
                position += 1
        orders = current.orders.copy()
        orders[rank] = changed
        return Skeleton(orders, current.gap)

    def _form(self, number: int) -> int:
        """Return the kind and the stage of a pass as one number."""
        return number // self.passes.problem.microbatches

    def _may_swap(self, first: int, second: int) -> bool:
        """Return whether two adjacent passes may be exchanged. Microbatches of a stage keep their order."""
        if self._form(first) == self._form(second):
            return False
        return all(need != first for need, _ in self.passes.needs[second])

    def _any_place(self) -> tuple[int, int]:
        rank = self.random.randrange(len(self.current.orders))
        return rank, self.random.randrange(1, len(self.current.orders[rank]) or 2)

    def _critical_place(self) -> tuple[int, int]:
        """Return a random pass of the critical path, as a rank and an index in its order."""
        passes, timing = self.passes, self.timing
        last = max(range(len(timing.orders)), key=lambda rank: timing.end[timing.orders[rank][-1]])
        number = self.random.choice(_critical_path(timing, last))
        rank = passes.rank[number]
        try:
            return rank, self.current.orders[rank].index(number)
        except ValueError:  # a weight half, which skeletons do not have
            return rank, 0


def _critical_path(timing: Timing, rank: int) -> list[int]:
    """Return the critical path to a rank's end, last pass first.

    Each pass starts when the next pass in the list ends, or when the output of the next pass arrives.
    """
    passes, end = timing.passes, timing.end
    predecessors: dict[int, int] = {}
    for order in timing.orders:
        for first, second in pairwise(order):
            predecessors[second] = first
    number: int | None = timing.orders[rank][-1]
    path: list[int] = []
    while number is not None:
        path.append(number)
        start = end[number] - passes.duration[number] - 1e-9
        previous = predecessors.get(number)
        cause = previous if previous is not None and end[previous] >= start else None
        for need, lag in passes.needs[number]:
            if end[need] + lag >= start and (cause is None or passes.rank[need] != passes.rank[number]):
                cause = need
        number = cause if start > 0 else None
    return path


def _score(timing: Timing) -> tuple[float, float]:
    """Return the time and, to break ties, the sum of the times at which ranks end, both divided by the lower bound."""
    unit = timing.passes.problem.lower_bound
    return round(timing.time / unit, 9), round(sum(timing.end[order[-1]] for order in timing.orders) / unit, 9)


def _filled(passes: Passes, skeleton: Skeleton) -> Timing:
    timing = fill(passes, skeleton)
    assert timing is not None, "the skeleton of a schedule that fits can be filled"
    return timing
