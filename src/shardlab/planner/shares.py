"""What a step's time goes to: compute, exposed communication by kind and axis, and the bubble."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

from shardlab.predict.estimate import Estimate
from shardlab.predict.forecast import enough, extended
from shardlab.predict.workload import Workload
from shardlab.strategies.plan import Plan
from shardlab.timeline.path import critical_path, path_parts

COMPUTE, BUBBLE = "compute", "bubble"


@dataclass(frozen=True)
class StepShares:
    """Shares of a step's time, the mean over ranks; together they make 1.

    Attributes:
        parts: of each part, the largest first: "compute", "bubble", "all_gather on tp".
    """

    parts: dict[str, float]

    @property
    def compute(self) -> float:
        return self.parts.get(COMPUTE, 0.0)

    @property
    def limit(self) -> tuple[str, float]:
        """The largest part that is no compute."""
        others = [(name, share) for name, share in self.parts.items() if name != COMPUTE]
        return max(others, key=lambda part: part[1], default=(COMPUTE, self.compute))


def shares_of(workload: Workload) -> StepShares:
    """Replay as many microbatches as `forecast` does, and extend what they show.

    Raises:
        UserError, Refused: as of `forecast`.
    """
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    each = workload.microbatches // plan.data_ranks
    few, more = enough(plan, each)
    seconds = _seconds(replace(workload, microbatches=few * plan.data_ranks).estimate())
    if few < each:
        longer = _seconds(replace(workload, microbatches=(few + more) * plan.data_ranks).estimate())
        times = (each - few) / more
        names = {*seconds, *longer}
        seconds = {name: extended(seconds.get(name, 0.0), longer.get(name, 0.0), times) for name in names}
    step = sum(seconds.values())
    return StepShares({name: part / step for name, part in sorted(seconds.items(), key=lambda each: -each[1])})


def path_of(workload: Workload) -> dict[str, float]:
    """Seconds of a step by what its critical path is made of, as replayed and extended as `shares_of` does."""
    plan = workload.plan
    assert isinstance(plan, Plan), "programs of their own are not planned"
    each = workload.microbatches // plan.data_ranks
    few, more = enough(plan, each)

    def parts(count: int) -> dict[str, float]:
        estimate = replace(workload, microbatches=count * plan.data_ranks).estimate()
        return path_parts(estimate.traced, critical_path(estimate.traced, estimate.times), estimate.place)

    seconds = parts(few)
    if few < each:
        longer, times = parts(few + more), (each - few) / more
        names = {*seconds, *longer}
        seconds = {name: extended(seconds.get(name, 0.0), longer.get(name, 0.0), times) for name in names}
    return dict(sorted(seconds.items(), key=lambda part: -part[1]))


def _seconds(estimate: Estimate) -> dict[str, float]:
    parts = defaultdict[str, float](float)
    parts[COMPUTE] = estimate.compute_share * estimate.step
    for (kind, axis), share in estimate.exposed.items():
        parts[f"{kind.replace('_', '-')} on {axis}"] += share * estimate.step
    parts[BUBBLE] = estimate.bubble_share * estimate.step
    return dict(parts)
