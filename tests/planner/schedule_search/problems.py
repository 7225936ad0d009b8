"""Random problems of schedules."""

from __future__ import annotations

from hypothesis import strategies as st

from shardlab.planner.schedule_search.problem import Objective, Placement, ScheduleProblem, StageCosts

TIMES = st.integers(1, 8).map(lambda quarters: quarters / 4)
ROUNDED_TIMES = st.integers(1, 8).map(lambda thirds: thirds / 3 + 0.1)
"""Times whose sums are rounded."""


@st.composite
def problems(draw: st.DrawFn, most_ranks: int = 4, most_microbatches: int = 6) -> ScheduleProblem:
    """Pipelines with unequal stages, whose memory limits leave room for one microbatch or more."""
    placement: Placement = draw(st.sampled_from(("loop", "vee")))
    ranks = draw(st.integers(2, most_ranks))
    stages_per_rank = 2 if placement == "vee" else draw(st.integers(1, 2))
    factor = draw(st.sampled_from((TIMES, ROUNDED_TIMES)))
    stages: list[StageCosts] = []
    weights = draw(st.sampled_from([(0.0, 0.5, 1.0), (0.0,)]))  # the second: whole backward passes
    for _ in range(ranks * stages_per_rank):
        activation = draw(TIMES)
        kept_memory = draw(st.sampled_from([None, 0.0, activation / 2, 2 * activation]))
        weight = draw(st.sampled_from(weights))
        stages.append(StageCosts(draw(factor), draw(factor), weight, activation, kept_memory))
    message = draw(st.sampled_from([0.0, 0.25]))
    microbatches = draw(st.integers(1, most_microbatches))
    free = ScheduleProblem(ranks, microbatches, tuple(stages), message, placement=placement)
    factors = [draw(st.sampled_from([1.0, 1.5, 2.0, 8.0])) for _ in range(ranks)]
    limits = tuple(minimum * factor for minimum, factor in zip(free.minimum_memory, factors, strict=True))
    objective: Objective = draw(st.sampled_from(("step", "span")))
    return ScheduleProblem(ranks, microbatches, tuple(stages), message, limits, placement, objective)
