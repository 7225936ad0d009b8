"""Updates that follow one another on the tape, made by one call: most of a small update's time is the call's."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from shardlab.check.accumulation import FREE
from shardlab.execute.functional import AdamW, TensorOptimizer, update_by_adamw
from shardlab.execute.optimizer import Slice
from shardlab.program import Op, OpKind


def followed(tape: Sequence[Op], ends: Collection[int] = ()) -> set[int]:
    """The indices of UPDATEs that another one follows, with nothing but FREEs between.

    Args:
        ends: indices of FREEs that none of them may wait beyond.
    """
    found: set[int] = set()
    last = -1
    for at, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            if last >= 0:
                found.add(last)
            last = at
        elif op.kind is not FREE or at in ends:
            last = -1
    return found


def step_together(slices: Sequence[Slice]) -> None:
    """Step all slices by the gradients that they have been given (see `Slice.take`): AdamW's in one call each for
    leaves that decay and that do not."""
    calls: dict[float, list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
    settings: dict[str, Any] = {}
    dropped = next((each.dropped for each in slices if each.dropped is not None), None)  # by the norm of all of them
    alone: list[TensorOptimizer] = []
    for each in slices:
        for optimizer in each.optimizers:
            together = len(slices) > 1 or dropped is not None
            if isinstance(optimizer, AdamW) and optimizer.state and together:
                for group in optimizer.param_groups:
                    settings = group
                    calls[group["weight_decay"]] += [(leaf, optimizer.state[leaf]) for leaf in group["params"]]
            else:  # the first step makes the state
                alone.append(optimizer)
    with torch.no_grad():
        for decay, leaves in calls.items():
            weights, states = [leaf for leaf, _ in leaves], [state for _, state in leaves]
            gradients = [gradient for leaf in weights if (gradient := leaf.grad) is not None]
            update_by_adamw(
                {**settings, "weight_decay": decay}, weights, gradients, states, fused=True, found_inf=dropped
            )
    for optimizer in alone:
        optimizer.step()
    for each in slices:
        each.finish()
