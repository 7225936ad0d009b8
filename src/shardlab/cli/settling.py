"""Passes with their numbers, by what this machine's communication costs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from shardlab.cli.expected import cluster_here, workload_of
from shardlab.errors import UserError
from shardlab.passes import settled
from shardlab.program.pass_names import named_passes
from shardlab.strategies.entry import StrategyEntry, planned_entry
from shardlab.train.config import TrainingConfig


def settled_here(entry: StrategyEntry, config: TrainingConfig) -> StrategyEntry:
    """The strategy with every pass's number, so that all its ranks and a repeated run rewrite it alike.

    What is best follows from the profile that `shardlab bench` has saved. Without one, and where it cannot price the
    step, passes stay as they are named, and unit costs guide them.
    """
    from shardlab.train.run import TrainingRun

    job = TrainingRun(config, Path()).job
    names = entry.passes_on(job.ranks)
    if all(each.setting is not None for each in named_passes(names)):
        return entry
    cluster = cluster_here(job.ranks)
    if cluster is None or cluster.size < job.ranks:
        return entry
    plan = entry.plan and entry.plan(job.ranks)
    as_written = replace(job, strategy=replace(plan, passes="none") if plan else job.strategy, passes=None)
    try:
        found = settled(replace(workload_of(as_written, cluster), passes=names).passed)
    except UserError:  # if a pass is at fault, the job says so
        return entry
    return planned_entry(replace(plan, passes=found), entry.name) if plan else replace(entry, passes=found)
