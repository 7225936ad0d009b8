"""`shardlab train --plan auto`: the plan for the machine at hand."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from shardlab.cli.cluster import cluster_called
from shardlab.cli.expected import cluster_here
from shardlab.cli.plan_options import PlanOptions
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

    Passes rewrite the plan that is chosen. Every rank of a world that was launched plans by itself, and finds the same.

    Args:
        sources: settings; how the batch is cut into microbatches is added to them.
        ranks: how many there are to be (None: as many as the machine has devices or cores).
        tell: whether to say what was chosen.

    Raises:
        UserError: when the machine was not measured, or no plan fits.
    """
    from shardlab.execute.gpus import gpu_count
    from shardlab.planner.chosen import choose
    from shardlab.planner.problem import Limits, Problem
    from shardlab.planner.words import described
    from shardlab.planner.workers import workers

    cluster = cluster_here(ranks or max(1, gpu_count())) or cluster_called("local", other_machine=False)
    ranks = ranks or cluster.size
    cluster.require(ranks)
    if cluster.nodes == 1:
        cluster = replace(cluster, per_node=ranks)
    passes = layout.given().get("passes")
    config = resolved(sources, planned_entry(Plan(Mesh(dp_shard=ranks), passes=passes), "auto"), ranks)
    if config.train.batch_ramp is not None:
        raise UserError("--plan auto chooses the microbatches of one batch, and a batch ramp has several; give a plan")
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
    sources.append(ConfigSource("the planner", {"train": cut}))
    entry = planned_entry(replace(chosen.plan, passes=passes), "auto")
    return entry, resolved(sources, entry, ranks)
