"""Exact search for small problems with OR-tools' constraint solver CP-SAT, an optional dependency (`shardlab[search]`).

The variables are the starts of all passes. Passes of a rank do not overlap, each pass starts after the passes that it
needs, and the activations of a rank stay within the limit. Microbatches of a stage keep their order, since they are
identical. The solver returns a lower bound of the time of all schedules and, if it ends, a schedule with that time.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardlab.common.errors import UserError
from shardlab.planner.schedule_search.timing import Passes, Timing, timing_of

MOST_PASSES = 600
"""Largest number of passes for the solver, which seldom proves anything about a larger problem in a minute."""

THREADS = 2
"""Number of threads of the solver."""

RESOLUTION = 100_000
"""Number of the solver's time units in the time of the known schedule.

Times of passes are rounded down to whole units, so that bounds are valid.
"""


@dataclass(frozen=True)
class Proof:
    """Result of the exact search.

    Attributes:
        lower_bound: lower bound of the time of all schedules.
        timing: schedule that is faster than the known one (None: none was found).
        is_complete: whether the solver has ended with a tight bound. The faster one of the known schedule and `timing`
            is then optimal, up to 0.1 % because of rounding.
    """

    lower_bound: float
    timing: Timing | None
    is_complete: bool


def has_solver() -> bool:
    """Return whether OR-tools is installed."""
    return importlib.util.find_spec("ortools") is not None


def prove(reference: Timing, seconds: float) -> Proof:
    """Search for a schedule that is faster than a known one, and for a lower bound of the time of all schedules.

    Args:
        reference: schedule that fits into memory.
        seconds: time limit of the solver.

    Raises:
        UserError: if OR-tools is not installed, or the problem has more than `MOST_PASSES` passes.
    """
    passes = reference.passes
    if passes.count > MOST_PASSES:
        raise UserError(
            f"the problem has {passes.count:,} passes, and the exact search takes at most {MOST_PASSES:,}; take fewer "
            "ranks or microbatches"
        )
    if not has_solver():
        raise UserError('the exact search needs OR-tools; install it with pip install "shardlab[search]"')
    from ortools.sat.python import cp_model

    unit = reference.time / RESOLUTION
    model: Any = cp_model.CpModel()
    starts = _model(model, passes, reference, unit)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = seconds
    solver.parameters.num_workers = THREADS
    status = solver.solve(model)
    problem = passes.problem
    bound = max(problem.lower_bound, solver.best_objective_bound * unit)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Proof(min(bound, reference.time), None, is_complete=status == cp_model.INFEASIBLE)
    orders = [  # weight halves of whole backward passes take no time, and are sorted first
        sorted(order, key=lambda number: (solver.value(starts[number]), passes.duration[number] > 0, number))
        for order in reference.orders
    ]
    timing = timing_of(passes, orders)
    if timing is None or not passes.fits(orders) or timing.time >= reference.time * (1 - 1e-9):
        timing = None
    best = reference.time if timing is None else timing.time
    return Proof(min(bound, best), timing, is_complete=status == cp_model.OPTIMAL and bound >= best * (1 - 1e-3))


def _model(model: Any, passes: Passes, reference: Timing, unit: float) -> list[Any]:
    """Add the variables and constraints of a problem to a model, and return the starts of all passes."""
    problem = passes.problem
    horizon = RESOLUTION + 1

    def units(time: float) -> int:
        return math.floor(time / unit)

    durations = [units(time) for time in passes.duration]
    starts = [model.new_int_var(0, horizon, f"s{number}") for number in range(passes.count)]
    for number in range(passes.count):
        model.add_hint(starts[number], units(reference.end[number] - passes.duration[number]))
        for need, lag in passes.needs[number]:
            model.add(starts[number] >= starts[need] + durations[need] + units(lag))
    ends: list[Any] = []
    scale = 10_000 / (max(stage.activation for stage in problem.stages) or 1.0)
    for order, limit in zip(reference.orders, problem.limits, strict=True):
        model.add_no_overlap(
            [model.new_fixed_size_interval_var(starts[number], durations[number], f"i{number}") for number in order]
        )
        end = model.new_int_var(0, horizon, "end")
        for number in order:
            model.add(end >= starts[number] + durations[number])
        first = model.new_int_var(0, horizon, "first")
        if problem.objective == "span":
            for number in order:
                model.add(first <= starts[number])
        else:
            model.add(first == 0)
        ends.append(end - first)
        if math.isfinite(limit):
            _limit_memory(model, passes, order, starts, durations, limit, scale)
    for row in range(3 * len(problem.stages)):
        numbers = range(row * problem.microbatches, (row + 1) * problem.microbatches)
        for one, other in pairwise(numbers):
            model.add(starts[one] + durations[one] <= starts[other])
    target = model.new_int_var(0, horizon, "time")
    for end in ends:
        model.add(target >= end)
    model.minimize(target)
    return starts


def _limit_memory(
    model: Any,
    passes: Passes,
    order: list[int],
    starts: list[Any],
    durations: list[int],
    limit: float,
    scale: float,
) -> None:
    """Limit the memory of a rank's activations. It grows at the start of a pass, and shrinks at the end of a pass.

    Amounts are rounded so that no schedule that fits is excluded. Lower bounds are therefore valid.
    """
    times: list[Any] = []
    changes: list[int] = []
    for number in order:
        change = passes.memory[number]
        if change:
            times.append(starts[number] + (0 if change > 0 else durations[number]))
            changes.append(math.floor(change * scale) if change > 0 else -math.floor(-change * scale))
    model.add_reservoir_constraint(times, changes, -len(order), math.ceil(limit * scale))
