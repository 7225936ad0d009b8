"""One rank's part of saving a run: a copy at a step's end, which a thread writes while the next steps run."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.checkpoint import CONFIG, STATE, Disk, Snapshot, chunks_of, commit, folder_of, updates_of, write_shard
from shardlab.checkpoint.commit import part_of
from shardlab.checkpoint.parameter_pieces import written_pieces
from shardlab.execute import Executor
from shardlab.execute.state import State
from shardlab.program import Program
from shardlab.program.field_types import interval
from shardlab.train.data import Batches
from shardlab.train.described import described
from shardlab.train.heartbeat import say
from shardlab.train.ramped import RampedExecutor
from shardlab.train.run import TrainingRun
from shardlab.train.saved import CHECKPOINTS
from shardlab.train.world import versions


class Saver:
    """Saves a run; all ranks call its methods at the same steps.

    What a rank has written it says in the exchange that every step makes; by it rank 0 knows when all have, and
    completes the checkpoint. There is one in flight at most: the next one waits for it.

    Args:
        executor: whose state is saved.
        run: of whom.
        batches: what it trains on.

    Attributes:
        saved: the step of the last complete checkpoint, on rank 0.
        validation_before: the loss before the run's first step, on rank 0.
    """

    def __init__(
        self, executor: Executor | RampedExecutor, run: TrainingRun, batches: Batches, disk: Disk | None = None
    ) -> None:
        self._executor = executor
        self._run = run
        self._batches = batches
        self._disk = disk or Disk()
        self._steps, self._seconds = interval(run.config.saving.save_every)
        self._snapshot: Snapshot | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None  # this rank's file
        self._documents: dict[str, str] = {}
        self._fingerprints: dict[int, str] = {}
        self._number = 0  # of the one in flight, or the last
        self._step = executor.state.step
        self._began = time.monotonic()
        self.saved: int | None = executor.state.step or None
        self.validation_before = math.nan

    @property
    def _state(self) -> State:
        return self._executor.state

    def due(self) -> bool:
        """Whether it is to save now, by the number of the step."""
        return self._steps is not None and self._state.step % self._steps == 0

    @property
    def wish(self) -> bool:
        """Whether rank 0 wishes to save, by its clock."""
        late = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        return late and self._state.rank == 0 and self._writing is None

    @property
    def told(self) -> int:
        """What this rank tells the others: the number of the checkpoint that it has written; below zero: it failed."""
        if self._writing is None or not self._writing.done():
            return 0
        return self._number if self._writing.exception() is None else -self._number

    def hear(self, told: Sequence[int]) -> None:
        """Take note of what each rank has told."""
        if self._writing is None or any(abs(number) != self._number for number in told):
            return
        error, self._writing = self._writing.exception(), None
        if error is not None:
            self._say_lost(self._step, error)
        if self._state.rank == 0:
            whole = all(number > 0 for number in told)
            end = partial(self._complete, documents=self._documents) if whole else self._drop
            self._pool.submit(end, self._step)

    def begin(self) -> float:
        """Copy what this rank keeps, to be written from now on.

        Returns:
            the seconds that it took, for which the run stood still.
        """
        began = time.perf_counter()
        self.settle()
        self._snapshot = self._snapshot or Snapshot(self._state)
        taken = self._snapshot.take()
        self._number, self._step, self._began = self._number + 1, self._state.step, time.monotonic()
        if self._state.rank == 0:
            self._documents = {STATE: json.dumps(self._words()), CONFIG: self._run.config.as_toml()}
        note = {"tensors": {name: len(tensor) for name, tensor in taken.items()}, "updates": updates_of(self._state)}
        folder, rank = self._folder(self._step), self._state.rank
        self._writing = self._pool.submit(write_shard, self._disk, folder, rank, chunks_of(taken), note)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait for what is in flight, all ranks together."""
        if self._writing is not None:
            wait([self._writing])
            told = torch.zeros(self._run.config.plan.ranks, dtype=torch.int64, device=self._state.settings.device)
            told[self._state.rank] = self.told
            dist.all_reduce(told)
            self.hear([int(number) for number in told])

    def wait(self) -> None:
        """Wait until this rank has nothing more to do for a checkpoint."""
        wait([self._pool.submit(int)])

    def finish(self, *, interrupted: bool) -> None:
        """The run has ended after a whole step: save, where that is asked for or nobody has asked for the end."""
        if self._step < self._state.step and (interrupted or self._run.config.saving.save_every is not None):
            self.begin()
        self._end()

    def give_up(self, finite: int) -> None:
        """The run has diverged, after so many steps that were finite: what was saved later is dropped."""
        if self._writing is not None and self._step > finite:
            wait([self._writing])
            self._writing = None
            dist.barrier()
            if self._state.rank == 0:
                self._drop(self._step)
        self._end()

    def _end(self) -> None:
        self.settle()
        self._pool.shutdown()

    def _complete(self, step: int, documents: dict[str, str]) -> None:
        """On rank 0, beside the steps: all ranks have written."""
        try:
            commit(
                self._disk,
                self._folder(step),
                self._run.config.plan.ranks,
                documents,
                self._run.config.saving.keep,
            )
        except Exception as error:  # nobody looks at this thread's: what is not said here is never known
            self._say_lost(step, error)
            self._drop(step)
        else:
            self.saved = step

    def _drop(self, step: int) -> None:
        with suppress(OSError):  # there may be nothing; what stays is swept away when the run is resumed
            self._disk.remove(part_of(self._folder(step)))

    def _folder(self, step: int) -> Path:
        return folder_of(self._run.out / CHECKPOINTS, step)

    def _say_lost(self, step: int, error: BaseException) -> None:
        if isinstance(error, OSError):
            trace, what = "", (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
        else:
            trace, what = "".join(traceback.format_exception(error)), repr(error)
        say(
            f"{trace}shardlab: the checkpoint after step {step} cannot be written, and training goes on without it "
            f"(rank {self._state.rank}: {what})"
        )

    def _words(self) -> dict[str, Any]:
        """All of a run that is no tensor. Random numbers are functions of the seed, the step and the place."""
        state, position = self._state, self._batches.position(self._state.step)
        identity = self._batches.corpus.identity
        return {
            "step": state.step,
            "loss_scale": [state.loss_scale.scale, state.loss_scale.calm],
            "data": {
                "sequence": position.sequence,
                "epochs": position.epochs,
                "identity": identity,
            },
            "validation_before": self.validation_before if math.isfinite(self.validation_before) else None,
            "program": self._fingerprint(state.checked.program),
            **self._fixed,
        }

    def _fingerprint(self, program: Program) -> str:
        """What a batch ramp's programs are known by; each is hashed once."""
        if id(program) not in self._fingerprints:
            self._fingerprints[id(program)] = program.fingerprint()
        return self._fingerprints[id(program)]

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """What is the same in all of a run's checkpoints."""
        return {
            "plan": self._run.job.title,
            "model": described(self._run.job)["model"],
            "layers": written_pieces(self._state.model, self._state.shapes),
            "versions": versions(),
            "threads": torch.get_num_threads(),
        }
