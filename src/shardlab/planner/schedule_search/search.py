"""Search for a schedule: published schedules, greedy schedules, then a local search until a limit is reached."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from shardlab.planner.schedule_search.greedy import greedy_orders, policies
from shardlab.planner.schedule_search.improve import GAPS, Skeleton, fill, improve, skeleton_of, with_less_memory
from shardlab.planner.schedule_search.problem import TOLERANCE, ScheduleProblem
from shardlab.planner.schedule_search.timing import Orders, Passes, Timing, timing_of
from shardlab.strategies.schedules import SCHEDULES, vee
from shardlab.strategies.schedules.actions import BackwardInput
from shardlab.strategies.schedules.steps import Steps, resolve_schedule

GREEDY = 12
"""Number of greedy schedules to try."""

STARTS = 3
"""Number of schedules from which the local search starts, in turn."""


@dataclass(frozen=True)
class Published:
    """Published schedule for the sizes of a problem.

    Attributes:
        name: name of the schedule.
        time: time of the schedule with the costs of the problem.
        memory: peak memory of the fullest rank.
        fits: whether every rank stays within the memory limit.
    """

    name: str
    time: float
    memory: float
    fits: bool


@dataclass(frozen=True)
class FoundSchedule:
    """Result of a search.

    Attributes:
        problem: the problem.
        timing: the schedule and its times.
        published: published schedules for these sizes, the fastest first.
        lower_bound: lower bound of the time of all schedules.
        source: name of the published schedule from which the best one was found, or "greedy".
        evaluations: number of schedules that the search tried.
        history: at each improvement, the seconds since the start of the search and the time of the best schedule.
        placed: the schedule with its messages, if already known (None: computed from `timing`).
    """

    problem: ScheduleProblem
    timing: Timing
    published: list[Published]
    lower_bound: float
    source: str
    evaluations: int
    history: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    placed: Steps | None = field(default=None, repr=False)

    @property
    def steps(self) -> Steps:
        """The schedule, with its messages."""
        return self.placed or self.timing.steps()

    @property
    def best_published(self) -> Published | None:
        """The fastest published schedule within the memory limit (None: there is none)."""
        return next((schedule for schedule in self.published if schedule.fits), None)

    @property
    def gap(self) -> float:
        """Upper bound of the share by which the schedule is slower than an optimal one."""
        return max(0.0, self.timing.time / self.lower_bound - 1)

    @property
    def is_optimal(self) -> bool:
        """Whether the schedule is proved to be optimal."""
        return self.gap <= 1e-6

    @property
    def bubble(self) -> float:
        """Share of the schedule's time in which the rank with the most work does not compute."""
        passes = self.timing.passes
        work = max(sum(passes.duration[number] for number in order) for order in self.timing.orders)
        return max(0.0, 1 - work / self.timing.time)


def published_schedule(searched: FoundSchedule, name: str) -> FoundSchedule:
    """Return the result of a search with a published schedule in place of the found one."""
    problem, passes = searched.problem, searched.timing.passes
    steps = resolve_schedule(SCHEDULES[name], problem.ranks, problem.microbatches, problem.stages_per_rank)
    timing = timing_of(passes, *passes.orders_of(steps))
    assert timing is not None, "a built-in schedule never waits forever"
    return replace(searched, timing=timing, source=name, placed=steps)


def search_schedule(
    problem: ScheduleProblem,
    *,
    seconds: float = math.inf,
    evaluations: int | None = None,
    on_progress: Callable[[float, float], None] | None = None,
) -> FoundSchedule:
    """Search for the fastest schedule of a problem. The result is never slower than a published schedule that fits.

    Among equally fast schedules, one with less memory is preferred.

    Ctrl-C ends the search like the time limit. The result is then the best schedule so far.

    Args:
        problem: the problem.
        seconds: time limit of the search.
        evaluations: number of changes that the local search tries, instead of a time limit. The result then does not
            depend on the clock.
        on_progress: function called at each improvement with the seconds searched and the time of the best schedule.
    """
    began = time.monotonic()
    passes = Passes(problem)
    published: list[Published] = []
    candidates: list[tuple[float, str, Orders, Timing]] = []
    proposals = 0

    def consider(name: str, orders: Orders) -> None:
        timing = timing_of(passes, orders)
        assert timing is not None, "a complete schedule never waits forever"
        if passes.fits(orders):
            candidates.append((timing.time, name, orders, timing))

    for name, steps in published_steps(problem).items():
        orders, whole = passes.orders_of(steps)
        timing = timing_of(passes, orders, whole)
        assert timing is not None, "a built-in schedule never waits forever"
        published.append(Published(name, timing.time, max(timing.peaks), passes.fits(orders)))
        consider(name, orders)
    first, *others = islice(policies(passes), GREEDY)
    consider("greedy", greedy_orders(passes, first))
    interrupted = False
    try:
        for policy in others:
            if time.monotonic() - began > seconds / 2:
                break
            consider("greedy", greedy_orders(passes, policy))
    except KeyboardInterrupt:
        interrupted = True
    candidates.sort(key=lambda candidate: (round(candidate[0] / problem.lower_bound, 9), max(candidate[3].peaks)))
    best = candidates[0]
    history = [(time.monotonic() - began, best[0])]

    def note(reached: float) -> None:
        if reached < history[-1][1] * (1 - TOLERANCE):
            history.append((time.monotonic() - began, reached))
            if on_progress is not None:
                on_progress(*history[-1])

    def stop(reached: float) -> bool:
        nonlocal proposals
        note(reached)
        optimal = min(reached, best[0]) <= problem.lower_bound * (1 + TOLERANCE)
        out_of_budget = proposals >= evaluations if evaluations is not None else time.monotonic() - began >= seconds
        proposals += 1
        return optimal or out_of_budget or interrupted

    timing, source = best[3], best[1]
    starts = _starts(passes, candidates)
    if starts and best[0] > problem.lower_bound * (1 + TOLERANCE):
        improved = improve(passes, [skeleton for _, skeleton in starts], Random(0), stop)
        note(improved.time)
        if improved.time < timing.time * (1 - TOLERANCE):
            timing, source = improved, starts[0][0]
    timing = with_less_memory(timing)
    published.sort(key=lambda schedule: (schedule.time, schedule.name))
    count = proposals + len(published) + GREEDY
    return FoundSchedule(problem, timing, published, problem.lower_bound, source, count, history)


def published_steps(problem: ScheduleProblem) -> dict[str, Steps]:
    """Return, by name, the built-in schedules that have the placement, stages and backward passes of a problem."""
    by_name: dict[str, Steps] = {}
    for name, schedule in SCHEDULES.items():
        if (schedule.placement is vee) == (problem.placement == "vee") and schedule.stages_per_rank in (
            None,
            problem.stages_per_rank,
        ):
            steps = resolve_schedule(schedule, problem.ranks, problem.microbatches, problem.stages_per_rank)
            if problem.has_halves or not any(isinstance(step, BackwardInput) for row in steps.of_ranks for step in row):
                by_name[name] = steps
    return by_name


def _starts(passes: Passes, candidates: list[tuple[float, str, Orders, Timing]]) -> list[tuple[str, Skeleton]]:
    """Return the schedules from which the local search starts, with their sources, the fastest first."""
    starts: list[tuple[float, str, Skeleton]] = []
    for _, name, orders, _ in candidates:
        for gap in (GAPS[0], GAPS[-1]):
            skeleton = skeleton_of(passes, orders, gap)
            timing = fill(passes, skeleton)
            if timing is not None and all(
                skeleton.orders != other.orders or gap != other.gap for _, _, other in starts
            ):
                starts.append((timing.time, name, skeleton))
    starts.sort(key=lambda start: start[0])
    return [(name, skeleton) for _, name, skeleton in starts[:STARTS]]
