"""Planned runs in turns: of plans that may be the fastest, the one that is."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from shardlab.cli.settling import settled_here
from shardlab.data import sources_of
from shardlab.errors import UserError
from shardlab.measure.race import Race
from shardlab.rules.pieces import counted
from shardlab.strategies.entry import StrategyEntry
from shardlab.timeline.units import seconds_text
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource
from shardlab.train.job import Job
from shardlab.train.launch_environment import find_launch_environment


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


def fastest(runs: Sequence[PlannedRun], seconds: float, *, tell: bool) -> PlannedRun:
    """Find the run whose steps are shortest, where all take turns on its ranks, each after the passes that help it.

    Where ranks that are started here fail, for want of memory or by one of the plans, the first run is taken.

    Args:
        runs: the one that is predicted fastest comes first.
        seconds: that their steps may take, about.
        tell: whether to say what is run, and what it took.

    Raises:
        UserError: when the data cannot be read, or a launcher's ranks do not meet.
    """
    from shardlab.train.launch import Named, run_ranks
    from shardlab.train.processes import RankFailed

    config = runs[0].config
    race = Race(seconds=seconds, optimizer=config.optimizer, data=tuple(sources_of(config.data.data)))
    jobs = [_settled(each) for each in runs]
    if tell:
        words = f"{counted(len(jobs), 'plan')} that may be the fastest take turns, for about {seconds:.0f} s"
        print(f"shardlab: {words}", file=sys.stderr)
    race_rank = Named[list[float]]("shardlab.measure.race_rank", "race_rank")
    try:
        took = run_ranks(jobs[0].ranks, race_rank, jobs, race)
    except (RankFailed, UserError) as error:
        if find_launch_environment(os.environ) is not None:  # the others wait for this rank
            raise
        why = "; ".join(dict.fromkeys((str(error).splitlines()[0], str(error).splitlines()[-1])))
        print(f"shardlab: no turns were taken ({why}); --plan auto takes {runs[0].name}", file=sys.stderr)
        return runs[0]
    at = min(range(len(jobs)), key=lambda place: took[place])
    if tell:
        times = "; ".join(f"{each.name}: {seconds_text(its)}" for each, its in zip(runs, took, strict=True))
        print(f"shardlab: measured a step: {times}; --plan auto takes {runs[at].name}", file=sys.stderr)
    return runs[at]


def _settled(run: PlannedRun) -> Job:
    from shardlab.train.run import TrainingRun

    job = TrainingRun(run.config, Path()).job
    return replace(job, strategy=settled_here(run.entry, job).for_job(job.ranks))
