"""`shardlab train --plan auto`: the plan for the machine at hand."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardlab.cli.cluster import cluster_called
from shardlab.cli.expected import cluster_here
from shardlab.cli.first_rank import of_first_rank
from shardlab.cli.plan_options import PlanOptions
from shardlab.hardware import Cluster
from shardlab.program import AXES, Mesh, UserError
from shardlab.program.field_types import field_types
from shardlab.program.precision import find_precision
from shardlab.strategies.entry import StrategyEntry, planned_entry
from shardlab.strategies.plan import Plan
from shardlab.timeline.units import seconds_text
from shardlab.train.config import TrainingConfig
from shardlab.train.config_sources import ConfigSource, resolved

AUTO = Path("auto")
"""In the place of a plan's file."""


def planned_here(
    layout: PlanOptions, sources: list[ConfigSource], ranks: int | None, *, tell: bool
) -> tuple[StrategyEntry, TrainingConfig]:
    """Plan for the machine at hand, with the batch that the sources say; flags of a plan stay as they are given.

    Passes rewrite the plan that is chosen. Ranks that a launcher has started meet, and take what the first of them
    chooses: each host would plan by its own profile.

    Args:
        sources: settings; how the batch is cut into microbatches is added to them.
        ranks: how many there are to be (None: as many as the machine has devices or cores).
        tell: whether to say what was chosen.

    Raises:
        UserError: when the machine was not measured, no plan fits, or a launcher's ranks do not meet.
    """
    ranks = ranks or _cluster(None).size
    passes = layout.given().get("passes")
    config = resolved(sources, planned_entry(Plan(Mesh(dp_shard=ranks), passes=passes), "auto"), ranks)
    if config.train.batch_ramp is not None:
        raise UserError("--plan auto chooses the microbatches of one batch, and a batch ramp has several; give a plan")
    words = json.loads(of_first_rank(partial(_choice, layout, config, ranks, tell=tell)))
    sources.append(ConfigSource("the planner", {"train": words["train"]}))
    entry = planned_entry(replace(Plan.from_dict(words["plan"]), passes=passes), "auto")
    return entry, resolved(sources, entry, ranks)


def _choice(layout: PlanOptions, config: TrainingConfig, ranks: int, *, tell: bool) -> str:
    """The plan that is best on this machine, and how the batch is cut: as JSON."""
    from shardlab.planner.chosen import choose
    from shardlab.planner.problem import Limits, Problem
    from shardlab.planner.words import described
    from shardlab.planner.workers import workers

    cluster = _cluster(ranks)
    cluster.require(ranks)
    if cluster.nodes == 1:
        cluster = replace(cluster, per_node=ranks)
    types = field_types(Plan)
    given = {name: value for name, value in layout.given().items() if name not in ("plan", "passes")}
    fixed = {name: value if name in AXES else types[name].of_words(value) for name, value in given.items()}
    problem = Problem(
        config.model,
        cluster,
        config.train.microbatches * config.train.micro_batch_size,
        (find_precision(config.precision.precision),),
        optimizer=config.optimizer.optimizer,
        limits=Limits(fixed),
    )
    with workers(problem, 1) as ask:
        choice = choose(problem, ask)
    chosen = choice.best.candidate
    if tell:
        words = "; ".join(described(problem, chosen))
        step = seconds_text(choice.best.seconds)
        print(f"shardlab: --plan auto chose {words}; predicted {step} a step", file=sys.stderr)
    cut = {
        "microbatches": problem.sequences // chosen.micro_batch_size,
        "micro_batch_size": chosen.micro_batch_size,
    }
    return json.dumps({"plan": chosen.plan.as_dict(), "train": cut})


def _cluster(ranks: int | None) -> Cluster:
    """This machine, as it was measured or as the tables know its GPUs.

    Raises:
        UserError: when neither is so.
    """
    from shardlab.execute.gpus import gpu_count

    return cluster_here(ranks or max(1, gpu_count())) or cluster_called("local", other_machine=False)
