"""PyTorch's pipelines: torch.distributed.pipelining's schedules, with the stages that our plan has."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportMissingTypeStubs=false
# torch leaves some of its annotations out.

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)

from shardlab.measure.side_by_side.contender import DrawnBatches, reported
from shardlab.measure.side_by_side.module import GPTModule, adamw, gpt_module, loss_of
from shardlab.measure.side_by_side.pairs import MICROBATCHES, OPTIMIZER, SEED, Size, StrategyPair

ONE_STAGE = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MORE_STAGES = {"interleaved-1f1b": ScheduleInterleaved1F1B, "zb-v": ScheduleZBVZeroBubble}
"""Schedules by the pair's name."""


def stages_of(pair: StrategyPair, size: Size, ranks: int, rank: int) -> dict[int, range]:
    """The stages of a rank, by number, and the layers of each; where and as our plan has them."""
    plan, layers = pair.plan(ranks), size.model.layers
    bounds = plan.bounds(layers)
    owners = plan.steps(layers, MICROBATCHES).ranks_of_stages
    return {stage: range(bounds[stage], bounds[stage + 1]) for stage, owner in enumerate(owners) if owner == rank}


class Pipeline:
    """One rank of a pipeline of PyTorch's.

    Attributes:
        modules: the rank's stages.
    """

    def __init__(
        self, pair: StrategyPair, size: Size, ranks: int, rank: int, batches: DrawnBatches, device: torch.device
    ) -> None:
        mine = stages_of(pair, size, ranks, rank)
        count = ranks * len(mine)
        self.modules: list[GPTModule] = [gpt_module(size.model, layers, SEED, device) for layers in mine.values()]
        numbered = zip(self.modules, mine, strict=True)
        stages: list[Any] = [PipelineStage(module, stage, count, device) for module, stage in numbered]
        self._schedule: Any = (
            ONE_STAGE[pair.name](stages[0], MICROBATCHES, loss_of)
            if pair.name in ONE_STAGE
            else MORE_STAGES[pair.name](stages, MICROBATCHES, loss_of)
        )
        self._optimizer = adamw([each for module in self.modules for each in module.parameters()], OPTIMIZER)
        self._first, self._last = 0 in mine, count - 1 in mine
        self._batches, self._device, self._at = batches, device, 0

    def step(self) -> Tensor:
        x, targets = (each.to(self._device) for each in self._batches.whole(self._at))
        losses: list[Tensor] = []
        given = (x,) if self._first else ()
        wanted = {"target": targets, "losses": losses} if self._last else {}
        self._schedule.step(*given, **wanted)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._at += 1
        mean = torch.stack(losses).mean() if self._last else torch.zeros((), device=self._device)
        return reported(mean, targets.numel() if self._last else 0)
