"""Planned runs in turns: of plans that may be the fastest, the one that is."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from shardlab.cli.settling import settled_here
from shardlab.data import sources_of
from shardlab.errors import Refused, UserError
from shardlab.measure.race import Race
from shardlab.rules.pieces import counted
from shardlab.strategies.entry import StrategyEntry
from shardlab.timeline.units import seconds_text
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource
from shardlab.train.job import Job
from shardlab.train.launch_environment import find_launch_environment

if TYPE_CHECKING:
    from shardlab.train.launch import Joining
    from shardlab.train.run import TrainingRun


@dataclass(frozen=True)
class PlannedRun:
    """A run with one of its plans.

    Attributes:
        entry: the plan.
        config: all that the run depends on.
        cut: how the batch is cut into microbatches for it.
        name: the plan in a few words.
    """

    entry: StrategyEntry
    config: TrainingConfig
    cut: ConfigSource
    name: str


@dataclass(frozen=True)
class PlannedRuns:
    """A run with each of the plans that may be its fastest.

    Attributes:
        runs: the one with the plan that is predicted fastest comes first.
        seconds: for which they may take turns, about.
    """

    runs: Sequence[PlannedRun]
    seconds: float = 0.0


Prove = Callable[[StrategyEntry, "TrainingRun"], object]
"""Sees that a run can be run under a strategy, or raises a UserError or Refused."""


def fastest(planned: PlannedRuns, run: TrainingRun, prove: Prove, joining: Joining, *, tell: bool) -> PlannedRun:
    """Find the plan whose steps are shortest, where all that the run can take have turns on its ranks, each after the
    passes that help it.

    Where ranks that are started here fail, for want of memory or by one of the plans, the one that is predicted fastest
    is taken.

    Args:
        run: what is trained, whatever its plan.
        prove: a plan that it refuses has no turn.
        joining: how the ranks meet.
        tell: whether to say what is run, and what it took.

    Raises:
        UserError: when a launcher's ranks do not meet.
    """
    from shardlab.train.launch import Named, run_ranks
    from shardlab.train.processes import RankFailed

    jobs: list[Job] = []
    running: list[PlannedRun] = []
    for each in planned.runs:
        entry = settled_here(each.entry, replace(run, config=each.config).job, timeout=run.config.train.timeout)
        plan = replace(each.config.plan, strategy=entry.for_job(each.config.plan.ranks), passes=entry.passes)
        its = replace(run, config=replace(each.config, plan=plan))
        with suppress(UserError, Refused):
            prove(entry, its)
            running.append(each)
            jobs.append(its.job)
    if len(jobs) < 2:
        return (*running, *planned.runs)[0]
    if tell:
        words = (
            f"{counted(len(jobs), 'plan')} that may be the fastest are measured in turns, for about "
            f"{planned.seconds:.0f} s"
        )
        print(f"shardlab: {words}", file=sys.stderr)
    data, init = tuple(sources_of(run.config.data.data)), run.config.train.init
    race = Race(seconds=planned.seconds, optimizer=run.config.optimizer, data=data, init=init)
    race_rank = Named[list[float]]("shardlab.measure.race_rank", "race_rank")
    try:
        took = run_ranks(jobs[0].ranks, race_rank, jobs, race, joining=joining)
    except (RankFailed, UserError) as error:
        if find_launch_environment(os.environ) is not None:  # the others wait for this rank
            raise
        why = "; ".join(dict.fromkeys((str(error).splitlines()[0], str(error).splitlines()[-1])))
        print(f"shardlab: plans were not measured ({why}); --plan auto chooses {running[0].name}", file=sys.stderr)
        return running[0]
    at = min(range(len(jobs)), key=lambda place: took[place])
    if tell:
        times = "; ".join(f"{each.name}: {seconds_text(its)}" for each, its in zip(running, took, strict=True))
        print(f"shardlab: measured a step: {times}; --plan auto chooses {running[at].name}", file=sys.stderr)
    return running[at]
