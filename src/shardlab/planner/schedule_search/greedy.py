"""Greedy schedules: an idle rank runs the best pass whose inputs have arrived and for which it has memory.

The rules of `Policy` decide between forward passes, input halves and weight halves, as the heuristic of zero-bubble
does (Qi et al. 2023, arXiv 2401.10241, section 3.1). `greedy_orders` follows one policy, and `policies` lists policies
to try.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from shardlab.planner.schedule_search.problem import TOLERANCE
from shardlab.planner.schedule_search.timing import FORWARD, INPUT, WEIGHT, Orders, Passes


@dataclass(frozen=True)
class Policy:
    """Rules of a greedy schedule.

    Attributes:
        limits: largest memory of activations on each rank.
        input_first: whether an input half runs before a forward pass if both are ready.
        patience: longest time for which a rank waits for an input half that is not ready yet, while a forward pass is
            ready, as a multiple of the rank's longest forward pass.
        gap: shortest gap in which a weight half runs, as a share of the half's time.
        late_first: whether, of the forward passes that are ready, the one of the latest stage runs first. Otherwise,
            the one of the earliest microbatch does.
        pending: largest number of weight halves that wait on a rank. If there are more, the rank runs one of them next.
    """

    limits: tuple[float, ...]
    input_first: bool = True
    patience: float = 0.0
    gap: float = 1.0
    late_first: bool = True
    pending: int = 1_000_000


def greedy_orders(passes: Passes, policy: Policy) -> Orders:
    """Return the orders of a greedy schedule within the policy's limits, which must allow one microbatch.

    A rank starts a forward pass of an early stage only if memory for its later stages is left. The oldest microbatch
    can then always continue, so there is no deadlock.
    """
    return _Greedy(passes, policy).run()


def policies(passes: Passes) -> Iterator[Policy]:
    """Yield policies for a problem, the most plausible first."""
    problem = passes.problem
    minimum = problem.minimum_memory
    largest = [min(limit, problem.microbatches * memory) for limit, memory in zip(problem.limits, minimum, strict=True)]
    limits = [tuple(largest)]
    for factor in (1.0, 1.5, 2.0):  # like 1F1B, ZB-H1 and ZB-H2: fewer microbatches on later ranks
        ahead = [memory * (1 + factor * (problem.ranks - 1 - rank)) for rank, memory in enumerate(minimum)]
        limits.append(tuple(min(one, other) for one, other in zip(largest, ahead, strict=True)))
    for policy_limits, gap, patience, late_first, first, pending in product(
        dict.fromkeys(limits), (1.0, 0.5, 0.01), (0.0, 0.5, 1.0), (True, False), (True, False), (1_000_000, 1, 2)
    ):
        yield Policy(policy_limits, first, patience, gap, late_first, pending)


class _Greedy:
    """State of a greedy schedule during its construction."""

    def __init__(self, passes: Passes, policy: Policy) -> None:
        self.passes, self.policy = passes, policy
        problem = passes.problem
        self.microbatches = problem.microbatches
        self.orders: Orders = [[] for _ in range(problem.ranks)]
        self.missing = [len(needs) for needs in passes.needs]
        self.ready_at = [0.0] * passes.count
        # Passes of each rank whose inputs are computed or in flight, by kind: (key, pass).
        self.candidates: list[list[list[tuple[float, int]]]] = [[[], [], []] for _ in range(problem.ranks)]
        self.used_memory = [0.0] * problem.ranks
        self.reserve = [0.0] * len(problem.stages)
        for rank in range(problem.ranks):
            later = 0.0
            for stage in reversed(problem.stages_of(rank)):
                self.reserve[stage] = later
                later += problem.stages[stage].activation
        self.patience = [
            policy.patience * max(problem.stages[stage].forward for stage in problem.stages_of(rank))
            for rank in range(problem.ranks)
        ]

    def run(self) -> Orders:
        """Construct the schedule. At each event of an idle rank, the rank starts a pass or waits for its next event."""
        for number, missing in enumerate(self.missing):
            if not missing:
                self._arrive(number)
        events = [(0.0, rank) for rank in range(len(self.orders))]
        idle_since: dict[int, float] = {}
        free = [0.0] * len(self.orders)
        while events:
            now, rank = heapq.heappop(events)
            if now < free[rank]:
                continue
            next_pass, wake_time = self._choose(rank, now)
            if next_pass is None:
                if wake_time is not None:
                    heapq.heappush(events, (wake_time, rank))
                else:
                    idle_since[rank] = now
                continue
            end = now + self.passes.duration[next_pass]
            free[rank] = end
            self.orders[rank].append(next_pass)
            self.used_memory[rank] += self.passes.memory[next_pass]
            for reader, lag in self.passes.readers[next_pass]:
                self.missing[reader] -= 1
                self.ready_at[reader] = max(self.ready_at[reader], end + lag)
                if not self.missing[reader]:
                    self._arrive(reader)
                    place = self.passes.rank[reader]
                    heapq.heappush(events, (max(self.ready_at[reader], free[place]), place))
                    if place in idle_since:  # this rank had nothing to wait for, and now chooses again
                        heapq.heappush(events, (max(now, free[place], idle_since.pop(place)), place))
            heapq.heappush(events, (end, rank))
        return self.orders

    def _arrive(self, number: int) -> None:
        kind, stage, microbatch = self.passes.parts(number)
        if kind == FORWARD:
            key = -stage * self.microbatches + microbatch if self.policy.late_first else float(microbatch)
        elif kind == INPUT:
            key = float(microbatch)
        else:
            key = float(len(self.orders[self.passes.rank[number]]))
        self.candidates[self.passes.rank[number]][kind].append((key, number))

    def _choose(self, rank: int, now: float) -> tuple[int | None, float | None]:
        """Return the pass that a rank runs now, or None and the time at which it should choose again."""
        policy = self.policy
        forwards, inputs, weights = self.candidates[rank]
        if weights and not self.passes.duration[(weight := min(weights))[1]]:
            return self._take(rank, WEIGHT, weight), None  # it only frees memory
        forward, next_forward = self._first(forwards, now, rank)
        backward, next_backward = self._first(inputs, now, rank)
        if backward is not None and (policy.input_first or forward is None):
            if len(weights) > policy.pending:
                return self._take(rank, WEIGHT, min(weights)), None
            return self._take(rank, INPUT, backward), None
        waits = next_backward is not None and next_backward - now <= self.patience[rank]
        if forward is not None and not waits:
            if len(weights) > policy.pending:
                return self._take(rank, WEIGHT, min(weights)), None
            return self._take(rank, FORWARD, forward), None
        if backward is not None:
            return self._take(rank, INPUT, backward), None
        times = [time for time in (next_forward, next_backward) if time is not None]
        wake_time = min(times, default=None)
        if weights:
            weight = min(weights)
            needed = policy.gap * self.passes.duration[weight[1]]
            blocked = forward is None and any(self.ready_at[number] <= now for _, number in (*forwards, *inputs))
            if wake_time is None or wake_time - now >= needed or (blocked and next_backward is None):
                return self._take(rank, WEIGHT, weight), None
        return None, wake_time

    def _first(
        self, candidates: list[tuple[float, int]], now: float, rank: int
    ) -> tuple[tuple[float, int] | None, float | None]:
        """Return the best pass that is ready and fits into memory, and the time at which the next one gets ready."""
        best: tuple[float, int] | None = None
        later: float | None = None
        for candidate in candidates:
            time = self.ready_at[candidate[1]]
            if time > now:
                if later is None or time < later:
                    later = time
            elif (best is None or candidate < best) and self._fits(rank, candidate[1]):
                best = candidate
        return best, later

    def _fits(self, rank: int, number: int) -> bool:
        change = self.passes.memory[number]
        if change <= 0:
            return True
        kind, stage, _ = self.passes.parts(number)
        reserve = self.reserve[stage] + self.passes.problem.growths[rank] if kind == FORWARD else 0.0
        return self.used_memory[rank] + change + reserve <= self.policy.limits[rank] * (1 + TOLERANCE)

    def _take(self, rank: int, kind: int, candidate: tuple[float, int]) -> int:
        self.candidates[rank][kind].remove(candidate)
        return candidate[1]
