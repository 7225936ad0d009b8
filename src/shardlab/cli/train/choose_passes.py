"""Choice of the passes of a training, and of their settings, by this machine's prices.

The first rank chooses before the ranks start, so that all ranks and a resumed run rewrite the program alike.
`run_passes_here` runs passes and keeps those that help; `settle_passes` fixes their settings for a job, and
`settle_run` for a run. "Settled" passes have their settings written out, as in `prefetch=2,bucket=4`.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from shardlab.cli.passes import useless_offload
from shardlab.cli.plan_options import checked
from shardlab.cli.train.this_machine import choose_on_first_rank, cluster_here, workload_of
from shardlab.common.errors import Refused, UserError
from shardlab.language.pass_names import DEFAULT_PASSES, named_passes
from shardlab.simulate.passes import GAIN, helpful_names
from shardlab.strategies.registry import StrategyEntry
from shardlab.train.config_sources import ConfigSource, merge_fields, origin_of

if TYPE_CHECKING:
    from shardlab.check import Checked
    from shardlab.simulate.hardware import Cluster
    from shardlab.simulate.passes import PassResult
    from shardlab.train.config import TrainingConfig
    from shardlab.train.job import Job
    from shardlab.train.run import TrainingRun


MOST_TRIED = 400_000
"""Largest number of ops of rewritten programs that are checked and simulated, at about 25 microseconds each. A pass
that is named with its setting is always run."""

SURE_GAIN = 0.02
"""Share of a step that a pass must gain by the machine's prices to be run without being named. Some passes with a
smaller prediction were measured to lose as much or more (docs/passes.md)."""


def settle_passes(
    entry: StrategyEntry,
    job: Job,
    *,
    counts: Collection[int] = (),
    lenient: bool = False,
    timeout: float | None = None,
) -> StrategyEntry:
    """Return a strategy with the settings of its passes fixed.

    If no passes are named, all passes that help are run. Their gains follow from the profile of `shardlab bench`, or
    from assumed prices without a profile. The ranks of a launcher take the choice of the first one. A wrong program is
    not reported here: every rank checks the program later and reports it.

    Args:
        job: job of the strategy, with or without its passes.
        counts: other numbers of microbatches that steps of the run have. They take the same passes.
        lenient: whether named passes that have nothing to do are left out, as for passes of an earlier run.
        timeout: seconds that ranks wait for each other (None: those of `RENDEZVOUS`).

    Raises:
        UserError: if the ranks of a launcher do not find each other.
    """
    choose = partial(_choose_passes, entry, job, [each for each in counts if each != job.microbatches], lenient)
    return entry.rewritten(job.ranks, choose_on_first_rank(choose, timeout))


def config_with_allowed_passes(entry: StrategyEntry, config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the passes from which a run chooses, which are all passes if none are named."""
    plan = config.plan
    entry = entry.rewritten(plan.ranks, entry.passes_on(plan.ranks, DEFAULT_PASSES))
    return replace(config, plan=replace(plan, strategy=entry.for_job(plan.ranks), passes=entry.passes))


def settle_run(
    entry: StrategyEntry, run: TrainingRun, sources: list[ConfigSource]
) -> tuple[StrategyEntry, TrainingRun]:
    """Return the strategy and the run with settled passes, and add the choice to the sources.

    Passes from the run's own configuration may have been settled for another number of ranks, so those with nothing to
    do are left out. Passes that a flag or a plan file names must have something to do.
    """
    plan = run.config.plan
    named_now = origin_of(sources, "plan", "passes") == "flags" or "plan" in merge_fields(sources, "plan")
    train = run.config.train
    entry = settle_passes(entry, run.job, counts=train.ramp.counts, lenient=not named_now, timeout=train.timeout)
    passes = entry.passes_on(plan.ranks)
    if passes != (merge_fields(sources, "plan").get("passes") or "none"):
        sources.append(ConfigSource("chosen", {"plan": {"passes": passes}}))
    plan = replace(plan, strategy=entry.for_job(plan.ranks), passes=entry.passes)
    return entry, replace(run, config=replace(run.config, plan=plan))


def run_passes_here(
    entry: StrategyEntry, job: Job, names: str, *, least: float | None = None, lenient: bool = False
) -> tuple[list[PassResult], Cluster]:
    """Run passes on the program of a job, and keep those that help by this machine's prices.

    On GPUs without prices, only passes that are named are run, because those that help CPUs may not help GPUs.

    Args:
        names: passes, as --passes takes them.
        least: share of a step that a pass must gain (None: `SURE_GAIN`, or any gain if passes are named).
        lenient: whether named passes that have nothing to do are left out.

    Returns:
        The program as written and after each pass, and the machine whose prices were used.

    Raises:
        Refused: if the program is wrong.
        UserError: if the sizes do not fit the program, or a named pass has nothing to do.
    """
    from shardlab.train.launch.ranks import device_type

    if least is None:
        least = GAIN if any(each.by_name for each in named_passes(names)) else SURE_GAIN
    entry.require_ops(job.ranks, job.model.layers, job.microbatches)
    written = checked(entry, job.ranks, job.sizes, job.microbatches)
    timed = replace(job, precision=_priced_precision(job.precision))

    def trace(*_: object) -> Checked:
        return written

    def on(cluster: Cluster, names: str) -> list[PassResult]:
        return replace(workload_of(timed, cluster), trace=trace).rewritten(
            names, MOST_TRIED, least=least, lenient=lenient
        )

    *measured, assumed = _clusters(job.ranks)
    for cluster in measured:
        with suppress(UserError):
            return on(cluster, names), cluster
    return on(assumed, names if device_type(job.ranks) == "cpu" else _only_named(names)), assumed


def _choose_passes(entry: StrategyEntry, job: Job, others: Sequence[int], lenient: bool) -> str:
    """Return the settled passes that a job can take with all its numbers of microbatches.

    `fuse-steps` is left out if there are several numbers and it is not named. The layers that it carries from step to
    step may depend on the number, but each step must find the weights that the previous one left.
    """
    names = entry.passes_on(job.ranks, DEFAULT_PASSES)
    asked = named_passes(names)
    if not asked or (all(each.setting for each in asked) and not lenient):
        return names
    try:
        passed, _ = run_passes_here(entry, job, names, lenient=lenient)
        kept = {each.name for each in asked if each.by_name and not lenient}
        if others:
            passed = [each for each in passed if each.name != "fuse-steps" or each.name in kept]
        for count in others:
            other, _ = run_passes_here(entry, replace(job, microbatches=count), helpful_names(passed), lenient=True)
            idle = {each.name for each in other if not each.applies} - kept
            passed = [each for each in passed if each.name not in idle]
    except (UserError, Refused):
        return names  # every rank reports the error later; raised here, it would leave the others waiting
    if useless := useless_offload(passed):
        print(f"shardlab: {useless}", file=sys.stderr)
    return helpful_names(passed)


def _only_named(names: str) -> str:
    """Return the passes without the word `all`."""
    return ",".join(each for each in names.split(",") if each.strip() != "all") or "none"


def _priced_precision(precision: str) -> str:
    """Return the precision whose prices are used. For float64, which only `verify` uses, it is float32."""
    return "fp32" if precision == "fp64" else precision


def _clusters(ranks: int) -> Iterator[Cluster]:
    """Yield this machine as it was measured, if it was, and as it is assumed to be, with a device for each rank."""
    from shardlab.measure.profile import memory_here
    from shardlab.simulate.hardware.cluster import unmeasured

    if (here := cluster_here(ranks)) is not None:
        yield replace(here, per_node=max(here.per_node, ranks))
    yield unmeasured(ranks, memory_here())
