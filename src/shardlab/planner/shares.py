"""What a step's time goes to: compute, exposed communication by kind and axis, and the bubble."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

from shardlab.predict.estimate import Estimate
from shardlab.predict.forecast import enough, extended
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import Plan
from shardlab.timeline.path import critical_path, path_parts

COMPUTE, BUBBLE = "compute", "bubble"

UNTRACED = "the step has more ops than are traced"
"""Why there are no shares of a step that has a forecast."""


PASSES_A_SECOND = 1000
"""Layers' passes that a slow core traces and times in a second."""


@dataclass(frozen=True)
class StepShares:
    """Shares of a step's time, the mean over ranks; together they make 1.

    Attributes:
        parts: of each part, the largest first: "compute", "bubble", "all_gather on tp".
    """

    parts: dict[str, float]

    def __str__(self) -> str:
        """The parts that can be seen in a figure of one decimal: `compute 88.6%, all-gather on tp 5.5%`."""
        return ", ".join(f"{name} {share:.1%}" for name, share in self.parts.items() if share >= 0.0005)

    @property
    def compute(self) -> float:
        return self.parts.get(COMPUTE, 0.0)

    @property
    def limit(self) -> tuple[str, float]:
        """The largest part that is no compute."""
        others = [(name, share) for name, share in self.parts.items() if name != COMPUTE]
        return max(others, key=lambda part: part[1], default=(COMPUTE, self.compute))


def shares_of(workload: Workload) -> StepShares:
    """What a step's time goes to, the mean over ranks.

    Raises:
        UserError, Refused: as of `forecast`.
    """
    seconds = _extended(workload, _seconds)
    step = sum(seconds.values())
    return StepShares({name: part / step for name, part in seconds.items()})


def path_of(workload: Workload) -> dict[str, float]:
    """Seconds of a step by what its critical path is made of, the largest first."""

    def parts(estimate: Estimate) -> dict[str, float]:
        return path_parts(estimate.traced, critical_path(estimate.traced, estimate.times), estimate.place)

    return _extended(workload, parts)


def trace_seconds(workload: Workload) -> float:
    """About how long it takes to find out what a step's time goes to."""
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    each = workload.microbatches // plan.data_ranks
    few, more = enough(plan, each)
    layers = 2 * workload.model.layers + 2
    return 2 * layers * (few if few == each else 2 * few + more) / PASSES_A_SECOND


def _extended(workload: Workload, parts: Callable[[Estimate], dict[str, float]]) -> dict[str, float]:
    """Parts of a step in seconds, the largest first: of as many microbatches as `forecast` replays, extended to all."""
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    ranks = plan.data_ranks
    each = workload.microbatches // ranks
    few, more = enough(plan, each)
    seconds = parts(replace(workload, microbatches=few * ranks).estimate())
    if few < each:
        longer = parts(replace(workload, microbatches=(few + more) * ranks).estimate())
        times = (each - few) / more
        names = {*seconds, *longer}
        seconds = {name: extended(seconds.get(name, 0.0), longer.get(name, 0.0), times) for name in names}
    return dict(sorted(seconds.items(), key=lambda part: (-part[1], part[0])))


def _seconds(estimate: Estimate) -> dict[str, float]:
    parts = defaultdict[str, float](float)
    parts[COMPUTE] = estimate.compute_share * estimate.step
    for (kind, axis), share in estimate.exposed.items():
        parts[f"{kind.replace('_', '-')} on {axis}"] += share * estimate.step
    parts[BUBBLE] = estimate.bubble_share * estimate.step
    return dict(parts)
