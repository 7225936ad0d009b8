"""Choice of the passes of a training, and of their settings, by this machine's prices.

The choice is made once, before the ranks start, so that all ranks and a resumed run rewrite the program in the same
way. `run_passes_here` runs passes and keeps those that help. `settle_passes` fixes their settings for a job, and
`settle_run` for a run. "Settled" passes have explicit settings, as in `prefetch=2,bucket=4`.
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
"""Largest number of ops, over all rewritten programs together, that are checked and simulated to choose passes, at
about 25 microseconds each. It does not limit passes that are named with their settings."""

SURE_GAIN = 0.02
"""Smallest predicted gain, as a share of the step, of a pass that runs without being named. Some passes with smaller
predicted gains slowed the step down by as much or more (docs/passes.md)."""


def settle_passes(
    entry: StrategyEntry,
    job: Job,
    *,
    counts: Collection[int] = (),
    lenient: bool = False,
    timeout: float | None = None,
) -> StrategyEntry:
    """Return a strategy with the settings of its passes fixed.

    If no passes are named, all passes that help are run. Their gains are predicted from the prices of `cluster_here`,
    or from assumed prices if this machine is unknown. All ranks of a launcher use the choice of the first rank. A wrong
    program is not reported here, because every rank checks the program later.

    Args:
        job: job of the strategy, with or without its passes.
        counts: further numbers of microbatches that occur in the run. The passes must suit all of them.
        lenient: whether to leave out named passes that have nothing to do. Used for the passes of an earlier run.
        timeout: seconds that ranks wait for each other (None: those of `RENDEZVOUS`).

    Raises:
        UserError: if the ranks of a launcher do not find each other.
    """
    choose = partial(_choose_passes, entry, job, [count for count in counts if count != job.microbatches], lenient)
    return entry.rewritten(job.ranks, choose_on_first_rank(choose, timeout))


def config_with_allowed_passes(entry: StrategyEntry, config: TrainingConfig) -> TrainingConfig:
    """Return the configuration with the passes from which a run may choose: the named ones, or else all."""
    plan = config.plan
    entry = entry.rewritten(plan.ranks, entry.passes_on(plan.ranks, DEFAULT_PASSES))
    return replace(config, plan=replace(plan, strategy=entry.for_job(plan.ranks), passes=entry.passes))


def settle_run(
    entry: StrategyEntry, run: TrainingRun, sources: list[ConfigSource]
) -> tuple[StrategyEntry, TrainingRun]:
    """Return the strategy and the run with settled passes, and record the choice in the sources.

    Passes in the run's own configuration may have been settled for another number of ranks. Those with nothing to do
    are left out. Passes that a flag or a plan file names must have something to do.
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
    entry: StrategyEntry, job: Job, names: str, *, least_gain: float | None = None, lenient: bool = False
) -> tuple[list[PassResult], Cluster]:
    """Run passes on the program of a job, and keep those that help by this machine's prices.

    On GPUs without prices, only named passes are run, because a pass that helps CPUs may not help GPUs.

    Args:
        names: passes, as --passes takes them.
        least_gain: smallest gain of a pass, as a share of the step (None: `SURE_GAIN`, or any gain of named passes).
        lenient: whether to leave out named passes that have nothing to do.

    Returns:
        The program as written and after each pass, and the machine whose prices were used.

    Raises:
        Refused: if the program is wrong.
        UserError: if the sizes do not fit the program, or a named pass has nothing to do.
    """
    from shardlab.train.launch.ranks import device_type

    if least_gain is None:
        least_gain = GAIN if any(named_pass.by_name for named_pass in named_passes(names)) else SURE_GAIN
    entry.require_ops(job.ranks, job.model.layers, job.microbatches)
    proof = checked(entry, job.ranks, job.sizes, job.microbatches)
    priced_job = replace(job, precision=_priced_precision(job.precision))

    def trace(*_: object) -> Checked:
        return proof

    def on(cluster: Cluster, names: str) -> list[PassResult]:
        return replace(workload_of(priced_job, cluster), trace=trace).rewritten(
            names, MOST_TRIED, least_gain=least_gain, lenient=lenient
        )

    *measured, assumed = _clusters(job.ranks)
    for cluster in measured:
        with suppress(UserError):
            return on(cluster, names), cluster
    return on(assumed, names if device_type(job.ranks) == "cpu" else _only_named(names)), assumed


def _choose_passes(entry: StrategyEntry, job: Job, other_counts: Sequence[int], lenient: bool) -> str:
    """Return settled passes that suit all numbers of microbatches of a job.

    If there are several numbers, `fuse-steps` is left out unless it is named. This pass keeps the weights of some
    layers for the next step, which must expect the same layers, but the layers may depend on the number.
    """
    names = entry.passes_on(job.ranks, DEFAULT_PASSES)
    requests = named_passes(names)
    if not requests or (all(request.setting for request in requests) and not lenient):
        return names
    try:
        results, _ = run_passes_here(entry, job, names, lenient=lenient)
        required_names = {request.name for request in requests if request.by_name and not lenient}
        if other_counts:
            results = [result for result in results if result.name != "fuse-steps" or result.name in required_names]
        for count in other_counts:
            other, _ = run_passes_here(entry, replace(job, microbatches=count), helpful_names(results), lenient=True)
            idle_names = {result.name for result in other if not result.applies} - required_names
            results = [result for result in results if result.name not in idle_names]
    except (UserError, Refused):
        return names  # Every rank reports the error later. Raised here, it would leave the other ranks waiting.
    if useless := useless_offload(results):
        print(f"shardlab: {useless}", file=sys.stderr)
    return helpful_names(results)


def _only_named(names: str) -> str:
    """Return the passes without the word `all`."""
    return ",".join(name for name in names.split(",") if name.strip() != "all") or "none"


def _priced_precision(precision: str) -> str:
    """Return the precision whose prices are used: fp32 in place of fp64, otherwise the precision itself."""
    return "fp32" if precision == "fp64" else precision


def _clusters(ranks: int) -> Iterator[Cluster]:
    """Yield this machine as a cluster with a device for each rank: with its known prices, if any, then with assumed
    prices.
    """
    from shardlab.measure.profile import memory_here
    from shardlab.simulate.hardware.cluster import unmeasured

    if (cluster := cluster_here(ranks)) is not None:
        yield replace(cluster, per_node=max(cluster.per_node, ranks))
    yield unmeasured(ranks, memory_here())
