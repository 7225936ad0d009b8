"""Updates that follow one another on the tape, made by one call: most of a small update's time is the call's."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from shardlab.check.accumulation import FREE
from shardlab.execute.optimizer import Slice
from shardlab.program import Op, OpKind


def followed(tape: Sequence[Op]) -> set[int]:
    """The indices of UPDATEs that another one follows, with nothing but FREEs between."""
    found: set[int] = set()
    last = -1
    for at, op in enumerate(tape):
        if op.kind is OpKind.UPDATE:
            if last >= 0:
                found.add(last)
            last = at
        elif op.kind is not FREE:
            last = -1
    return found


def step_together(slices: Sequence[Slice]) -> None:
    """Step all slices by the gradients that they have been given (see `Slice.take`): AdamW's in one call each for
    leaves that decay and that do not."""
    calls: dict[float, list[tuple[Tensor, dict[str, Any]]]] = defaultdict(list)
    settings: dict[str, Any] = {}
    dropped = next((each.dropped for each in slices if each.dropped is not None), None)  # by the norm of all of them
    alone: list[torch.optim.Optimizer] = []
    for each in slices:
        for optimizer in each.optimizers:
            together = len(slices) > 1 or dropped is not None
            if isinstance(optimizer, torch.optim.AdamW) and optimizer.state and together:
                for group in optimizer.param_groups:
                    settings = group
                    calls[group["weight_decay"]] += [(leaf, optimizer.state[leaf]) for leaf in group["params"]]
            else:  # the first step makes the state
                alone.append(optimizer)
    with torch.no_grad():
        for decay, leaves in calls.items():
            beta1, beta2 = settings["betas"]
            adamw(
                [leaf for leaf, _ in leaves],
                [gradient for leaf, _ in leaves if (gradient := leaf.grad) is not None],
                [state["exp_avg"] for _, state in leaves],
                [state["exp_avg_sq"] for _, state in leaves],
                [],
                [state["step"] for _, state in leaves],
                fused=True,
                found_inf=dropped,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=settings["lr"],
                weight_decay=decay,
                eps=settings["eps"],
                maximize=False,
            )
    for optimizer in alone:
        optimizer.step()
    for each in slices:
        each.finish()
