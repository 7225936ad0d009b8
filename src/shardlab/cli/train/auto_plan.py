"""`shardlab train --plan auto`: the plan for the machine at hand."""

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
from shardlab.cli.train.choose_passes import settled_here
from shardlab.cli.train.this_machine import cluster_here, of_first_rank
from shardlab.common.errors import Refused
from shardlab.common.fields import field_types
from shardlab.common.text import seconds_text
from shardlab.language import AXES, Mesh, UserError
from shardlab.language.precision import find_precision
from shardlab.language.rules.kinds import counted
from shardlab.measure.progress import Race
from shardlab.simulate.hardware import Cluster
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.registry import StrategyEntry, planned_entry
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource, merged, plan_below, resolved
from shardlab.train.data import sources_of
from shardlab.train.job import Job
from shardlab.train.launch.environment import find_launch_environment

if TYPE_CHECKING:
    from shardlab.train.launch.ranks import Joining
    from shardlab.train.run import TrainingRun

AUTO = Path("auto")
"""In the place of a plan's file."""

SHARE = 0.1
"""Share of the time that a run is predicted to take in which plans may take turns before it."""

ENOUGH = 30.0
"""Seconds after which turns end, unless their least steps take longer."""

START = 10.0
"""Seconds until their passes are chosen and their ranks have begun, about."""

Prove = Callable[[StrategyEntry, "TrainingRun"], object]
"""Sees that a run can be run under a strategy, or raises a UserError or Refused."""


def planned_here(
    layout: PlanOptions, sources: list[ConfigSource], ranks: int | None, *, measure: bool, tell: bool
) -> PlannedRuns:
    """Plan for the machine at hand, with the batch that the sources say; flags of a plan stay as they are given.

    Passes rewrite the plan that is chosen. Ranks that a launcher has started meet, and take what the first of them
    chooses: each host would plan by its own profile.

    Args:
        sources: settings.
        ranks: how many there are to be (None: as many as the machine has devices or cores).
        measure: whether plans may take turns; none do where layers are compiled or steps captured, which takes long.
        tell: whether to say what was chosen.

    Returns:
        The run with the plan that is predicted fastest, and then, where the run is long enough, with those that may be
        as fast.

    Raises:
        UserError: when the machine was not measured, no plan fits, or a launcher's ranks do not meet.
    """
    ranks = ranks or _cluster(None).size
    passes = layout.given().get("passes")
    config = resolved(sources, planned_entry(Plan(Mesh(dp_shard=ranks), passes=passes), "auto"), ranks)
    if config.train.batch_ramp is not None:
        raise UserError(
            "--plan auto chooses the microbatches of one batch size, but a batch ramp has several; give a plan"
        )
    measure = measure and not (config.train.compile or config.train.cuda_graph)
    choose = partial(_choice, layout, config, ranks, measure=measure, tell=tell)
    told = json.loads(of_first_rank(choose, config.train.timeout))
    found: list[PlannedRun] = []
    for words in told["plans"]:
        entry = planned_entry(replace(Plan.from_dict(words["plan"]), passes=passes), "auto")
        its = [*sources, ConfigSource("the planner", {"train": words["train"]})]
        found.append(PlannedRun(entry, resolved(its, entry, ranks), its[-1], words["words"]))
    return PlannedRuns(found, told["seconds"])


def planned_before(layout: PlanOptions, sources: Sequence[ConfigSource], ranks: int | None) -> PlannedRuns | None:
    """Find the plan of a run that goes on.

    Args:
        sources: its settings, and then flags.
        ranks: how many were asked for, or are there; None if nobody says.

    Returns:
        The run with its plan and its microbatches; None where it ran a program of its own, on another number of ranks,
        another batch, or not as flags of a plan say now.
    """
    from shardlab.planner.problem import Limits

    before = [source for source in sources if source.name != "flags"]
    _, _, plan, _ = plan_below(before)
    train, wanted = merged(before, "train"), merged(sources, "train")
    cut = {name: train[name] for name in ("microbatches", "micro_batch_size")}
    if plan is None or ranks not in (None, plan.mesh.world) or not Limits(_fixed(layout)).allow(plan):
        return None
    if math.prod(cut.values()) != math.prod(wanted[name] for name in cut):
        return None
    entry = planned_entry(replace(plan, passes=layout.given().get("passes", plan.passes)), "auto")
    source = ConfigSource("the run before", {"train": cut})
    config = resolved([*sources, source], entry, plan.mesh.world)
    return PlannedRuns([PlannedRun(entry, config, source, "the plan that it had")])


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
    from shardlab.train.launch.processes import RankFailed
    from shardlab.train.launch.ranks import Named, run_ranks

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
    race_rank = Named[list[float]]("shardlab.measure.side_by_side.sides", "race_rank")
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


def _fixed(layout: PlanOptions) -> dict[str, Any]:
    """Fields of a plan and sizes of axes that flags give.

    Raises:
        UserError: when blocks are to be frozen, for which no plan is searched.
    """
    if "freeze" in layout.given():
        raise UserError("--plan auto plans a training of all blocks; leave out --freeze, or give a plan by flags")
    types = field_types(Plan)
    given = {name: value for name, value in layout.given().items() if name not in ("plan", "passes")}
    return {name: value if name in AXES else types[name].of_words(value) for name, value in given.items()}


def _choice(layout: PlanOptions, config: TrainingConfig, ranks: int, *, measure: bool, tell: bool) -> str:
    """The plan that is predicted fastest on this machine, then those that are to take turns with it, each with how the
    batch is cut, and for how many seconds: as JSON."""
    from shardlab.planner.choose import choose, contenders, least_seconds
    from shardlab.planner.describe import described, short
    from shardlab.planner.problem import Candidate, Limits, Problem, family
    from shardlab.planner.workers import workers

    cluster = _cluster(ranks)
    cluster.require(ranks)
    if cluster.nodes == 1:
        cluster = replace(cluster, per_node=ranks)
    problem = Problem(
        config.model,
        cluster,
        config.train.microbatches * config.train.micro_batch_size,
        (find_precision(config.precision.precision),),
        optimizer=config.optimizer.optimizer,
        limits=Limits(_fixed(layout)),
    )
    with workers(problem, 1) as ask:
        choice = choose(problem, ask, measured=() if measure else None)
    seconds = SHARE * config.train.steps * choice.best.seconds - START
    found = contenders(choice, seconds) if measure else [choice.best]
    if tell:
        words = "; ".join(described(problem, choice.best.candidate))
        chose = "chose" if len(found) == 1 else "predicts to be the fastest"
        step = seconds_text(choice.best.seconds)
        print(f"shardlab: --plan auto {chose} {words}; predicted {step} a step", file=sys.stderr)

    def words_of(candidate: Candidate) -> dict[str, Any]:
        size = candidate.micro_batch_size
        cut = {"microbatches": problem.sequences // size, "micro_batch_size": size}
        name = f"{family(candidate.plan)}, {short(candidate)}"
        return {"words": name, "plan": candidate.plan.as_dict(), "train": cut}

    plans = [words_of(each.candidate) for each in found]
    return json.dumps({"plans": plans, "seconds": min(seconds, max(ENOUGH, least_seconds(found)))})


def _cluster(ranks: int | None) -> Cluster:
    """This machine, as it was measured or as the tables know its GPUs.

    Raises:
        UserError: when neither is so.
    """
    from shardlab.execute.requirements import gpu_count

    return cluster_here(ranks or max(1, gpu_count())) or cluster_called("local", other_machine=False)
