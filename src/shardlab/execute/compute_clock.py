"""Seconds that a rank's device spends on the forward and the backward passes of a step."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import time
from itertools import groupby

import torch

from shardlab.execute.compute import Instruction
from shardlab.execute.executor import Executor
from shardlab.program import OpKind

FORWARD = frozenset({OpKind.FORWARD, OpKind.RECOMPUTE, OpKind.ATTEND, OpKind.LOSS_STATS, OpKind.LOSS})
"""Counted as forward; the loss comes with its own gradient."""

BACKWARD = frozenset({OpKind.BACKWARD, OpKind.BACKWARD_INPUT, OpKind.BACKWARD_WEIGHT, OpKind.ATTEND_BACKWARD})


class ComputeClock:
    """Times the forward and the backward ops of an executor's steps, from then on.

    Two readings of a clock go around each run of such ops that follow one another: of the host's clock, or on a GPU two
    events, which are read when the step is over. Of steps that are replayed as a CUDA graph the last one counts for all
    since the reading before: its events are the graph's.
    """

    def __init__(self, executor: Executor) -> None:
        self._device = executor.state.settings.device
        self._seconds = [0.0, 0.0]
        self._events: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._captured: list[tuple[int, torch.cuda.Event, torch.cuda.Event]] = []
        self._graph = executor.graph
        self._replays = 0
        around = self._by_events if self._device.type == "cuda" else self._by_host
        directions = [_direction(op.kind) for op in executor.state.tape]
        for direction, places in groupby(range(len(directions)), directions.__getitem__):
            run = list(places)
            if direction is not None:
                around(executor.instructions, run[0], run[-1], direction)

    def read(self) -> tuple[float, float]:
        """Seconds forward and backward since the last reading."""
        if self._events:
            torch.cuda.synchronize(self._device)
            for direction, began, ended in self._events:
                self._seconds[direction] += began.elapsed_time(ended) / 1000
            self._events.clear()
        if self._graph is not None and (replays := self._graph.replays - self._replays):
            torch.cuda.synchronize(self._device)
            self._replays += replays
            for direction, began, ended in self._captured:
                self._seconds[direction] += replays * began.elapsed_time(ended) / 1000
        forward, backward = self._seconds
        self._seconds[:] = 0.0, 0.0
        return forward, backward

    def _by_host(self, instructions: list[Instruction], first: int, last: int, direction: int) -> None:
        began, seconds, now = 0.0, self._seconds, time.perf_counter

        def begin() -> None:
            nonlocal began
            began = now()

        def end() -> None:
            seconds[direction] += now() - began

        _put_around(instructions, first, last, begin, end)

    def _by_events(self, instructions: list[Instruction], first: int, last: int, direction: int) -> None:
        def begin() -> None:
            captures = torch.cuda.is_current_stream_capturing()
            began, ended = (torch.cuda.Event(enable_timing=True, external=captures) for _ in range(2))
            began.record()
            (self._captured if captures else self._events).append((direction, began, ended))

        def end() -> None:
            (self._captured if torch.cuda.is_current_stream_capturing() else self._events)[-1][2].record()

        _put_around(instructions, first, last, begin, end)


def _direction(kind: OpKind) -> int | None:
    return 0 if kind in FORWARD else 1 if kind in BACKWARD else None


def _put_around(instructions: list[Instruction], first: int, last: int, begin: Instruction, end: Instruction) -> None:
    opening = instructions[first]

    def first_of_all() -> None:
        begin()
        opening()

    instructions[first] = first_of_all
    closing = instructions[last]

    def last_of_all() -> None:
        closing()
        end()

    instructions[last] = last_of_all
