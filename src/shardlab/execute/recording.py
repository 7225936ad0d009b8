"""Recording when each op of a real step began and ended. An executor that nobody records pays nothing for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from shardlab.check.buckets import batches_of
from shardlab.execute.communicator import Wait
from shardlab.execute.compute import Instruction
from shardlab.execute.executor import Executor
from shardlab.execute.stopwatch import Read, stopwatch_for
from shardlab.program import Op
from shardlab.program.ops import COMMUNICATION
from shardlab.program.record import Moments, StepRecord


class OpTimer:
    """Runs steps of an executor and keeps what it saw of each.

    Attributes:
        steps: the steps recorded, the last perhaps only as far as it came.
    """

    def __init__(self, executor: Executor) -> None:
        self.steps: list[StepRecord] = []
        self._executor = executor
        self._watch = stopwatch_for(executor.state.settings.device)
        self._began: dict[int, Read] = {}
        self._ended: dict[int, Read] = {}
        self._over: dict[int, list[Read]] = defaultdict(list)
        self._issuing: Iterator[int] = iter(())
        self._batches = batches_of(executor.state.tape, COMMUNICATION)
        self._batched = frozenset(chain(*self._batches.values()))
        plain = zip(executor.state.tape, executor.instructions, strict=True)
        self._timed = [self._around(at, op, instruction) for at, (op, instruction) in enumerate(plain)]

    def step(self) -> Tensor:
        """Run one step as `Executor.step` does; it is among the steps also if it fails."""
        executor, watch = self._executor, self._watch
        plain, wait_of = executor.instructions, executor.links.wait_of
        executor.instructions, executor.links.wait_of = self._timed, self._watched
        self._began, self._ended, self._over = {}, {}, defaultdict(list)
        watch.begin()
        began, ended = watch.now(), None
        try:
            loss = executor.step()
            ended = watch.now()
            if executor.state.settings.device.type == "cuda":
                torch.cuda.synchronize(executor.state.settings.device)
        finally:
            executor.instructions, executor.links.wait_of = plain, wait_of
            self._keep(began, ended)
        return loss

    def _around(self, at: int, op: Op, instruction: Instruction) -> Instruction:
        now, communicates = self._watch.now, op.kind in COMMUNICATION
        issued = [at] if self._executor.links.starts_alone(op.peer, op.batch) else self._batches.get(op.batch, [at])

        def run() -> None:
            self._began[at] = now()
            if communicates:
                self._issuing = chain(issued, repeat(issued[-1]))
            instruction()
            self._ended[at] = now()

        return run

    def _watched(self, work: Any) -> Wait:
        """In place of the executor's own way to wait; the works of a batch come in the order of its ops."""
        at = next(self._issuing)
        wait, over = self._watch.watch(work, batched=at in self._batched)
        self._over[at].append(over)
        return wait

    def _keep(self, began: Read, ended: Read | None) -> None:
        for ops in self._batches.values():  # one work may stand for a whole batch
            for at in ops[1:]:
                if at in self._began:
                    self._over[at] = self._over[at] or self._over[ops[0]]
        start = began()
        if start is None:
            return
        record = StepRecord(start, ended and ended())
        for at, read in self._began.items():
            moment = read()
            if moment is not None:
                overs = [over() for over in self._over[at]]
                last = max((over for over in overs if over is not None), default=None)
                end = self._ended.get(at)
                record.ops[at] = Moments(moment, end and end(), None if None in overs else last)
        self.steps.append(record)
