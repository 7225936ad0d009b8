"""Gathers and reductions of a pipeline whose stages' weights are sharded, placed among a rank's actions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardlab.strategies.schedules.actions import Backward, BackwardWeight
from shardlab.strategies.schedules.messages import Message, Send, Step


@dataclass(frozen=True)
class Unshard:
    """Gather a stage's whole weights."""

    stage: int


@dataclass(frozen=True)
class Reshard:
    """Let go of a stage's whole weights and keep the shard."""

    stage: int


@dataclass(frozen=True)
class ReduceGrad:
    """Reduce the sum over microbatches of a stage's gradients over the data-parallel ranks."""

    stage: int


ShardedStep = Step | Unshard | Reshard | ReduceGrad


def with_sharding(steps: Sequence[Step], whole: int = 3) -> list[ShardedStep]:
    """Place the steps of sharded stages among a rank's steps.

    A rank holds the whole weights of the next `whole` stages it computes on: that of now, and the others come while it
    computes (torch's pipelining does so too, with 3: one for a forward, one for a backward, one on its way). A stage's
    gradients are reduced once, when its last backward pass is done and what other ranks wait for has been sent.

    Args:
        steps: one rank's actions and messages.
        whole: how many stages' whole weights the rank may hold, 1 or more.
    """
    ends = {step.stage: i for i, step in enumerate(steps) if isinstance(step, Backward | BackwardWeight)}
    held: list[int] = []
    result: list[ShardedStep] = []
    reduce: list[ShardedStep] = []
    for i, (step, wanted) in enumerate(zip(steps, _next_stages(steps, whole), strict=True)):
        if not isinstance(step, Send):
            result += reduce
            reduce = []
            result += [Reshard(stage) for stage in held if stage not in wanted]
            result += [Unshard(stage) for stage in wanted if stage not in held]
            held = wanted
        result.append(step)
        if ends.get(step.stage) == i:
            reduce.append(ReduceGrad(step.stage))
    return [*result, *reduce, *(Reshard(stage) for stage in held)]


def _next_stages(steps: Sequence[Step], count: int) -> list[list[int]]:
    """List for each step the first `count` stages that it and those after it compute on."""
    stages: list[int] = []
    found: list[list[int]] = []
    for step in reversed(steps):
        if not isinstance(step, Message):
            stages = [step.stage, *(stage for stage in stages if stage != step.stage)][:count]
        found.append(stages)
    return found[::-1]
