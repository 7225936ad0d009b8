"""`shardlab train --plan auto`: the plan for the machine at hand."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shardlab.cli.cluster import cluster_called
from shardlab.cli.expected import cluster_here
from shardlab.cli.first_rank import of_first_rank
from shardlab.cli.plan_options import PlanOptions
from shardlab.cli.taking_turns import PlannedRun, PlannedRuns
from shardlab.hardware import Cluster
from shardlab.program import AXES, Mesh, UserError
from shardlab.program.field_types import field_types
from shardlab.program.precision import find_precision
from shardlab.strategies.entry import planned_entry
from shardlab.strategies.plan import Plan
from shardlab.timeline.units import seconds_text
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource, merged, plan_below, resolved

AUTO = Path("auto")
"""In the place of a plan's file."""

SHARE = 0.1
"""Share of the time that a run is predicted to take in which plans may take turns before it."""

ENOUGH = 30.0
"""Seconds after which turns end, unless their least steps take longer."""

START = 10.0
"""Seconds until their passes are chosen and their ranks have begun, about."""


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
    from shardlab.planner.chosen import choose
    from shardlab.planner.contenders import contenders, least_seconds
    from shardlab.planner.families import family
    from shardlab.planner.problem import Candidate, Limits, Problem
    from shardlab.planner.words import described, short
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
    from shardlab.execute.gpus import gpu_count

    return cluster_here(ranks or max(1, gpu_count())) or cluster_called("local", other_machine=False)
