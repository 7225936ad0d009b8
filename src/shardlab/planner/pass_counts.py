"""How often each stage of a pipeline passes a microbatch, and how often it does so after another stage of its rank."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from shardlab.planner.arrays import Array, Places
from shardlab.planner.order_times import KINDS, NUMBER
from shardlab.strategies.plan import Plan
from shardlab.strategies.schedules import BackwardWeight
from shardlab.strategies.schedules.actions import Work
from shardlab.strategies.schedules.steps import Steps

UNSPLIT = ("gpipe", "1f1b", "interleaved-1f1b", "breadth-first")
"""Schedules whose backward passes hand back a gradient last of all."""


def hands_back_last(plan: Plan) -> bool:
    """Whether each rank of a plan's pipeline is sure to end with a pass that the stage before waits for."""
    return isinstance(plan.schedule, str) and plan.schedule in UNSPLIT


class PassCounts(NamedTuple):
    """Passes of a pipeline's order of work.

    Attributes:
        all: of each kind on each stage: (kinds, stages).
        visits: those that compute with weights, and the one before them that does is of another stage: (kinds, stages).
        begins: the stage of each rank's first pass: (ranks,).
        ahead: forward passes on each stage before the first backward pass of its rank: (stages,).
        turns: the stage of each rank's first backward pass: (ranks,).
    """

    all: Array
    visits: Array
    begins: Places
    ahead: Array
    turns: Places


def pass_counts(steps: Steps) -> PassCounts:
    """Count the passes of all ranks."""
    all, visits = np.zeros((2, len(KINDS), steps.stages))
    ahead = np.zeros(steps.stages)
    begins, turns = np.zeros((2, len(steps.of_ranks)), np.intp)
    for rank, order in enumerate(steps.of_ranks):
        before, turned = -1, False
        for step in order:
            if isinstance(step, Work):
                kind, stage = NUMBER[type(step)], step.stage
                all[kind, stage] += 1
                if not turned:
                    ahead[stage] += kind == 0
                    turned, turns[rank] = kind > 0, stage
                if not isinstance(step, BackwardWeight):
                    if before < 0:
                        begins[rank] = stage
                    visits[kind, stage] += stage != before
                    before = stage
    return PassCounts(all, visits, begins, ahead, turns)
