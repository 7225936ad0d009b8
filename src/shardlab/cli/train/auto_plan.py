"""`shardlab train --plan auto`: choose the plan for this machine.

`plan_for_this_machine` searches with `shardlab.planner` for the plan with the fastest prediction. If the run is long
enough, it also returns plans that may be as fast. `measure_fastest` then times steps of all these plans in rotation on
the ranks of the run, and chooses the fastest. A resumed run keeps its plan (`plan_of_resumed_run`).
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlab.cli.plan_options import PlanOptions, cluster_called
from shardlab.cli.step_request import StepRequest
from shardlab.cli.train.choose_passes import settle_passes
from shardlab.cli.train.this_machine import choose_on_first_rank, cluster_here
from shardlab.common.errors import Refused
from shardlab.common.text import counted, seconds_text
from shardlab.language import Mesh, UserError
from shardlab.measure.progress import Race
from shardlab.simulate.hardware import Cluster
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry, entry_from_plan
from shardlab.train.config import BatchConfig, TrainingConfig
from shardlab.train.config_sources import ConfigSource, merge_fields, plan_settings, resolve_config
from shardlab.train.data import parse_sources
from shardlab.train.job import Job
from shardlab.train.launch.environment import find_launch_environment

if TYPE_CHECKING:
    from shardlab.train.launch.ranks import Rendezvous
    from shardlab.train.run import TrainingRun


AUTO = Path("auto")
"""Value of --plan that requests the choice of a plan."""

MEASURING_SHARE = 0.1
"""Largest time for measuring plans, as a share of the run's predicted time."""

MEASURING_SECONDS = 30.0
"""Largest time for measuring plans, in seconds. The smallest possible number of steps may take longer."""

SETUP_SECONDS = 10.0
"""Approximate time for choosing the plans' passes and starting the ranks, in seconds."""

Prove = Callable[[StrategyEntry, "TrainingRun"], object]
"""Function that raises `UserError` or `Refused` if a run cannot use a strategy."""


def plan_for_this_machine(
    layout: PlanOptions, sources: list[ConfigSource], ranks: int | None, *, measure: bool, tell: bool
) -> PlannedRuns:
    """Search a plan for this machine and the batch of the settings. Flags of a plan restrict the search.

    All ranks of a launcher use the choice of the first rank, because the profiles of the hosts may differ.

    Args:
        layout: flags of a plan.
        sources: settings of the run.
        ranks: number of ranks (None: one for each device or core of the machine).
        measure: whether plans may be measured. They never are with compiled layers or captured steps, because preparing
            these takes long.
        tell: whether to print the choice.

    Returns:
        A run with the plan that is predicted fastest. If the run is long enough, also runs with plans that may be as
        fast.

    Raises:
        UserError: if the machine was not measured, no plan fits, or the ranks of a launcher do not find each other.
    """
    ranks = ranks or _cluster(None).size
    passes = layout.flag_values().get("passes")
    config = resolve_config(sources, entry_from_plan(Plan(Mesh(dp_shard=ranks), passes=passes), "auto"), ranks)
    if config.train.batch_ramp is not None:
        raise UserError(
            "--plan auto chooses the microbatches of one batch size, but a batch ramp has several; give a plan"
        )
    measure = measure and not (config.train.compile or config.train.cuda_graph)
    choose = partial(_choose_plans, layout, config, ranks, measure=measure, tell=tell)
    choice = json.loads(choose_on_first_rank(choose, config.train.timeout))
    runs: list[PlannedRun] = []
    for row in choice["plans"]:
        entry = entry_from_plan(replace(Plan.from_dict(row["plan"]), passes=passes), "auto")
        cut = ConfigSource("the planner", {"train": row["train"]})
        runs.append(PlannedRun(entry, resolve_config([*sources, cut], entry, ranks), cut, row["words"]))
    return PlannedRuns(runs, choice["seconds"])


def plan_of_resumed_run(layout: PlanOptions, sources: Sequence[ConfigSource], ranks: int | None) -> PlannedRuns | None:
    """Return the earlier plan of a resumed run, if it still fits the settings.

    Args:
        layout: flags of a plan.
        sources: settings of the run, followed by flags.
        ranks: number of ranks that is requested or available (None: unknown).

    Returns:
        The run with its earlier plan and microbatches. None if it had no plan, another number of ranks or another
        batch, or if flags contradict its plan.
    """
    from shardlab.planner.problem import Limits

    saved_sources = [source for source in sources if source.name != "flags"]
    _, _, plan, _ = plan_settings(saved_sources)
    train, requested = merge_fields(saved_sources, "train"), merge_fields(sources, "train")
    batch = {name: train[name] for name in ("microbatches", "micro_batch_size")}
    if plan is None or ranks not in (None, plan.mesh.world) or not Limits(_fixed_fields(layout)).allow(plan):
        return None
    if math.prod(batch.values()) != math.prod(requested[name] for name in batch):
        return None
    entry = entry_from_plan(replace(plan, passes=layout.flag_values().get("passes", plan.passes)), "auto")
    source = ConfigSource("the run before", {"train": batch})
    config = resolve_config([*sources, source], entry, plan.mesh.world)
    return PlannedRuns([PlannedRun(entry, config, source, "the plan that it had")])


@dataclass(frozen=True)
class PlannedRun:
    """Run with one of the candidate plans.

    Attributes:
        entry: plan as a strategy.
        config: configuration of the run with this plan.
        cut: settings that divide the batch into this plan's microbatches.
        name: short description of the plan.
    """

    entry: StrategyEntry
    config: TrainingConfig
    cut: ConfigSource
    name: str


@dataclass(frozen=True)
class PlannedRuns:
    """Runs to choose from, one with each plan that may be the fastest.

    Attributes:
        runs: the runs. The one with the plan that is predicted fastest comes first.
        seconds: approximate time for measuring them.
    """

    runs: Sequence[PlannedRun]
    seconds: float = 0.0


def measure_fastest(
    planned: PlannedRuns, run: TrainingRun, prove: Prove, joining: Rendezvous, *, tell: bool
) -> PlannedRun:
    """Time steps of several plans in rotation on the ranks of a run, and return the run with the fastest plan.

    The program of each plan is first rewritten by the passes that help it. If `prove` accepts fewer than two plans,
    nothing is measured. In this case, and if a rank that this process has started fails (for example because memory
    runs out), the result is the run with the first accepted plan, which is predicted fastest.

    Args:
        planned: plans to measure.
        run: run, with any of the plans.
        prove: check of a plan. A plan that it refuses is not measured.
        joining: rendezvous of the ranks.
        tell: whether to print the plans and their times.

    Raises:
        UserError: if the ranks of a launcher do not find each other.
    """
    from shardlab.train.faults import RankFailed
    from shardlab.train.launch.ranks import LazyFunction, run_ranks

    jobs: list[Job] = []
    options: list[PlannedRun] = []
    for option in planned.runs:
        entry = settle_passes(option.entry, replace(run, config=option.config).job, timeout=run.config.train.timeout)
        plan = replace(option.config.plan, strategy=entry.for_job(option.config.plan.ranks), passes=entry.passes)
        candidate = replace(run, config=replace(option.config, plan=plan))
        with suppress(UserError, Refused):
            prove(entry, candidate)
            options.append(option)
            jobs.append(candidate.job)
    if len(jobs) < 2:
        return (*options, *planned.runs)[0]
    if tell:
        words = f"{counted(len(jobs), 'plan')} that may be the fastest are measured in turns"
        print(f"shardlab: {words}, for about {planned.seconds:.0f} s", file=sys.stderr)
    data, init = tuple(parse_sources(run.config.data.data)), run.config.train.init
    race = Race(seconds=planned.seconds, optimizer=run.config.optimizer, data=data, init=init)
    race_rank = LazyFunction[list[float]]("shardlab.measure.side_by_side.sides", "race_rank")
    try:
        times = run_ranks(jobs[0].ranks, race_rank, jobs, race, joining=joining)
    except (RankFailed, UserError) as error:
        if find_launch_environment(os.environ) is not None:  # the others wait for this rank
            raise
        reason = "; ".join(dict.fromkeys((str(error).splitlines()[0], str(error).splitlines()[-1])))
        print(f"shardlab: plans were not measured ({reason}); --plan auto chooses {options[0].name}", file=sys.stderr)
        return options[0]
    fastest, _ = min(zip(options, times, strict=True), key=lambda pair: pair[1])
    if tell:
        texts = "; ".join(f"{option.name}: {seconds_text(time)}" for option, time in zip(options, times, strict=True))
        print(f"shardlab: measured a step: {texts}; --plan auto chooses {fastest.name}", file=sys.stderr)
    return fastest


def _fixed_fields(layout: PlanOptions) -> dict[str, Any]:
    """Return the fields of a plan and the sizes of axes that flags give.

    Raises:
        UserError: for --freeze, which the search does not support.
    """
    if "freeze" in layout.flag_values():
        raise UserError("--plan auto plans a training of all blocks; leave out --freeze, or give a plan by flags")
    return {name: value for name, value in layout.values().items() if name != "passes"}


def _choose_plans(layout: PlanOptions, config: TrainingConfig, ranks: int, *, measure: bool, tell: bool) -> str:
    """Search the plans to run or to measure.

    Returns:
        JSON object. `plans`: the plan that is predicted fastest, then further plans to measure, each with its division
        of the batch. `seconds`: time for measuring.
    """
    from shardlab.planner.choose import choose, find_contenders, least_seconds
    from shardlab.planner.describe import describe, summary
    from shardlab.planner.problem import Candidate, Limits, family
    from shardlab.planner.workers import workers

    cluster = _cluster(ranks)
    cluster.require(ranks)
    if cluster.nodes == 1:
        cluster = replace(cluster, per_node=ranks)
    request = StepRequest(
        config.model,
        cluster,
        batch=BatchConfig(global_batch=config.train.microbatches * config.train.micro_batch_size),
        precision=config.precision.precision,
        optimizer=config.optimizer.optimizer,
    )
    problem = request.problem(Limits(_fixed_fields(layout)))
    with workers(problem, 1) as processes:
        choice = choose(problem, processes, measured=() if measure else None, families=False)
    if not choice.results.complete:  # Ctrl-C: the run itself must not begin after it
        raise KeyboardInterrupt
    seconds = MEASURING_SHARE * config.train.steps * choice.best.seconds - SETUP_SECONDS
    outcomes = find_contenders(choice, seconds) if measure else [choice.best]
    if tell:
        words = "; ".join(describe(problem, choice.best.candidate))
        verb = "chose" if len(outcomes) == 1 else "predicts to be the fastest"
        step = seconds_text(choice.best.seconds)
        print(f"shardlab: --plan auto {verb} {words}; predicted {step} a step", file=sys.stderr)

    def as_dict(candidate: Candidate) -> dict[str, Any]:
        size = candidate.micro_batch_size
        batch = {"microbatches": problem.sequences // size, "micro_batch_size": size}
        name = f"{family(candidate.plan)}, {summary(candidate)}"
        return {"words": name, "plan": candidate.plan.as_dict(), "train": batch}

    plans = [as_dict(outcome.candidate) for outcome in outcomes]
    return json.dumps({"plans": plans, "seconds": min(seconds, max(MEASURING_SECONDS, least_seconds(outcomes)))})


def _cluster(ranks: int | None) -> Cluster:
    """Return a cluster that describes this machine, from its profile or from the table of GPUs.

    Raises:
        UserError: if neither has it.
    """
    from shardlab.execute.requirements import gpu_count

    return cluster_here(ranks or max(1, gpu_count())) or cluster_called("local", other_machine=False)
