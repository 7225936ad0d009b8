"""A whole step as one CUDA graph: the host issues its kernels once, and the device repeats them by itself."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from shardlab.execute.state import State
from shardlab.models.tensors.tokens import sent_to

FIRST_STEPS = 3
"""Steps with an update that run op by op: they make connections, optimizer states, and what the device keeps from then
on."""


class DeviceGraph(Protocol):
    """What a device is given to do, to be done again and again with the same memory."""

    def capture(self, ops: Callable[[], None]) -> None:
        """Note what the device would be given; none of it runs."""
        ...

    def replay(self) -> None:
        """Have the device do all of it."""
        ...


class CudaGraph:
    """A graph of CUDA (torch.cuda.CUDAGraph), NCCL's collectives and messages included."""

    def __init__(self) -> None:
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, ops: Callable[[], None]) -> None:
        """Note what the device would be given; none of it runs."""
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # NCCL's watchdog asks meanwhile
            ops()

    def replay(self) -> None:
        """Have the device do all of it."""
        self._graph.replay()


GRAPHS: dict[str, Callable[[], DeviceGraph]] = {"cuda": CudaGraph}
"""Graphs by the type of the device."""


class StepInputs:
    """What a captured step reads that changes from step to step, in memory of the device that stays.

    Attributes:
        batch: tokens and targets, by microbatch.
        tokens: targets that count, ().
        rate: the learning rate, ().
    """

    def __init__(self, state: State) -> None:
        device = state.settings.device
        self.batch = {
            m: (torch.empty_like(tokens, device=device), torch.empty_like(targets, device=device))
            for m, (tokens, targets) in state.batch.items()
        }
        self.tokens = torch.zeros((), dtype=state.exact, device=device)
        self.rate = torch.zeros((), dtype=torch.float32, device=device)  # as AdamW's fused kernel reads it

    def fill(self, state: State) -> None:
        """Take what the host has of a step."""
        for m, held in self.batch.items():
            for there, here in zip(held, state.batch[m], strict=True):
                there.copy_(sent_to(there.device, here))
        self.tokens.fill_(state.tokens)
        self.rate.fill_(state.rate)


class StepGraph:
    """Runs an executor's steps: the first op by op, the next is captured, and it and all others are replayed.

    Args:
        state: the rank's tensors. While its step is captured, the numbers of a step stay on the device.

    Attributes:
        replays: how many steps were replayed.
    """

    def __init__(self, state: State) -> None:
        self.replays = 0
        self._state = state
        self._left = FIRST_STEPS
        self._graph: DeviceGraph | None = None
        self._inputs: StepInputs | None = None
        self._loss = state.loss
        self._squared_norm: float | Tensor = math.nan

    def run(self, ops: Callable[[], None]) -> None:
        """Run a step, or have the device repeat it; the state has the step's batch."""
        state = self._state
        if self._left:
            ops()
            self._left -= state.finite  # an update makes the optimizer's state, unless it is left out
            return
        if self._inputs is None:
            self._inputs = StepInputs(state)
        self._inputs.fill(state)
        if self._graph is None:
            self._graph = self._captured(ops, self._inputs)
        self._graph.replay()
        self.replays += 1
        state.loss = self._loss.clone()
        if isinstance(self._squared_norm, Tensor):
            state.squared_norm = float(self._squared_norm)
            state.finite = math.isfinite(state.squared_norm)

    def _captured(self, ops: Callable[[], None], inputs: StepInputs) -> DeviceGraph:
        state = self._state
        graph = GRAPHS[state.settings.device.type]()
        before = state.batch, state.tokens, state.rate
        state.captured = True
        state.batch, state.tokens, state.rate = inputs.batch, inputs.tokens, inputs.rate
        try:
            graph.capture(ops)
        finally:
            state.captured = False
            state.batch, state.tokens, state.rate = before
        self._loss, self._squared_norm = state.loss, state.squared_norm
        return graph
