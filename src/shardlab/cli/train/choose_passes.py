"""Passes with their settings, by what communication costs here: before ranks are started, for all of them."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardlab.cli.passes import useless_offload
from shardlab.cli.plan_options import checked
from shardlab.cli.train.this_machine import cluster_here, of_first_rank, workload_of
from shardlab.common.errors import Refused, UserError
from shardlab.language.pass_names import UNSAID, named_passes
from shardlab.simulate.passes import GAIN, settled
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config_sources import ConfigSource, merged, origin

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.passes import Passed
    from shardlab.train.config import TrainingConfig
    from shardlab.train.job import Job
    from shardlab.train.run import TrainingRun

MOST_TRIED = 400_000
"""Ops of rewritten programs that are checked and replayed at most, some 25 microseconds each; what is named with its
setting is made in any case."""

SURE_GAIN = 0.02
"""The share of a step that a pass must gain by the machine's prices to be run where nobody has named any. Of those that
gain less, some were measured to lose as much or more (docs/passes.md)."""


def settled_here(
    entry: StrategyEntry,
    job: Job,
    *,
    counts: Collection[int] = (),
    lenient: bool = False,
    timeout: float | None = None,
) -> StrategyEntry:
    """The strategy with the setting of each of its passes, so that all ranks and a repeated run rewrite it alike.

    Where nobody says which, all passes are run that help. What helps follows from the profile that `shardlab bench` has
    saved, or from that of cores that nobody has measured. Ranks that a launcher has started meet, and take what the
    first of them finds. A wrong program, or sizes that do not fit it, are left to the check of what is run, which every
    rank makes.

    Args:
        job: what is run, with the strategy's passes or without.
        counts: other numbers of microbatches that steps have as well, which take the same passes.
        lenient: leave passes out that are named and have nothing to do, as where an earlier start has settled them.
        timeout: seconds in which a launcher's ranks meet (None: those of `JOINING`).

    Raises:
        UserError: when a launcher's ranks do not meet.
    """
    choose = partial(_choice, entry, job, [each for each in counts if each != job.microbatches], lenient)
    return entry.rewritten(job.ranks, of_first_rank(choose, timeout))


def unsettled_run(entry: StrategyEntry, config: TrainingConfig) -> TrainingConfig:
    """The configuration with the passes from which a run chooses, also where nobody says which."""
    plan = config.plan
    entry = entry.rewritten(plan.ranks, entry.passes_on(plan.ranks, UNSAID))
    return replace(config, plan=replace(plan, strategy=entry.for_job(plan.ranks), passes=entry.passes))


def settled_run(
    entry: StrategyEntry, run: TrainingRun, sources: list[ConfigSource]
) -> tuple[StrategyEntry, TrainingRun]:
    """The strategy and the run with the settings of their passes; what was chosen is added to the sources.

    Passes that a run's own configuration brings along may have been settled for other ranks: those with nothing to do
    here are left out. Those that a flag or a plan's page names must have something to do.
    """
    plan = run.config.plan
    named_now = origin(sources, "plan", "passes") == "flags" or "plan" in merged(sources, "plan")
    train = run.config.train
    entry = settled_here(entry, run.job, counts=train.ramp.counts, lenient=not named_now, timeout=train.timeout)
    passes = entry.passes_on(plan.ranks)
    if passes != (merged(sources, "plan").get("passes") or "none"):
        sources.append(ConfigSource("chosen", {"plan": {"passes": passes}}))
    plan = replace(plan, strategy=entry.for_job(plan.ranks), passes=entry.passes)
    return entry, replace(run, config=replace(run.config, plan=plan))


def passed_here(
    entry: StrategyEntry, job: Job, names: str, *, least: float | None = None, lenient: bool = False
) -> tuple[list[Passed], Cluster]:
    """A job's program as it is written, and as each pass leaves it, by the prices of the machine that is also given.

    On GPUs without a price only passes that are named themselves are run: what helps cores need not help them.

    Args:
        least: the share of a step that a pass must gain (None: what is sure, or any where some are named).
        lenient: leave passes out that are named and have nothing to do.

    Raises:
        Refused: when the program is wrong.
        UserError: when sizes do not fit it, or a pass that is named has nothing to do.
    """
    from shardlab.train.launch.ranks import device_type

    if least is None:
        least = GAIN if any(each.by_name for each in named_passes(names)) else SURE_GAIN
    entry.require_ops(job.ranks, job.model.layers, job.microbatches)
    written = checked(entry, job.ranks, job.sizes, job.microbatches)
    timed = replace(job, precision=_timed(job.precision))

    def trace(*_: object) -> Checked:
        return written

    def on(cluster: Cluster, names: str) -> list[Passed]:
        return replace(workload_of(timed, cluster), trace=trace).rewritten(
            names, MOST_TRIED, least=least, lenient=lenient
        )

    *measured, assumed = _clusters(job.ranks)
    for cluster in measured:
        with suppress(UserError):
            return on(cluster, names), cluster
    return on(assumed, names if device_type(job.ranks) == "cpu" else _only_named(names)), assumed


def _choice(entry: StrategyEntry, job: Job, others: Sequence[int], lenient: bool) -> str:
    """The passes with their settings; where other numbers of microbatches take them too, those that all of these can.

    Which layers `fuse-steps` carries may depend on the number, and all must find the weights that one has left.
    """
    names = entry.passes_on(job.ranks, UNSAID)
    asked = named_passes(names)
    if not asked or (all(each.setting for each in asked) and not lenient):
        return names
    try:
        found, _ = passed_here(entry, job, names, lenient=lenient)
        kept = {each.name for each in asked if each.by_name and not lenient}
        if others:
            found = [each for each in found if each.name != "fuse-steps" or each.name in kept]
        for count in others:
            there, _ = passed_here(entry, replace(job, microbatches=count), settled(found), lenient=True)
            idle = {each.name for each in there if not each.applies} - kept
            found = [each for each in found if each.name not in idle]
    except (UserError, Refused):
        return names  # every rank runs into the reason, where this one alone would leave the others waiting
    if useless := useless_offload(found):
        print(f"shardlab: {useless}", file=sys.stderr)
    return settled(found)


def _only_named(names: str) -> str:
    """Without those that `all` stands for."""
    return ",".join(each for each in names.split(",") if each.strip() != "all") or "none"


def _timed(precision: str) -> str:
    """The numbers in which kernels are timed: of float64, which only `verify` takes, those that it stands for."""
    return "fp32" if precision == "fp64" else precision


def _clusters(ranks: int) -> Iterator[Cluster]:
    """This machine as measured, if it was, and as it is taken to be: with a place for each rank."""
    from shardlab.measure.profile import memory_here
    from shardlab.simulate.hardware.cluster import unmeasured

    if (here := cluster_here(ranks)) is not None:
        yield replace(here, per_node=max(here.per_node, ranks))
    yield unmeasured(ranks, memory_here())
