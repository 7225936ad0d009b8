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
from shardlab.checkpoint.commit import PART, part_of, remove_shard
from shardlab.checkpoint.parameter_pieces import written_pieces
from shardlab.execute import Executor
from shardlab.execute.products import rows_of
from shardlab.execute.state import State
from shardlab.models.tensors.onednn import CHOICES
from shardlab.program import Program
from shardlab.program.field_types import interval
from shardlab.train.data import Batches
from shardlab.train.described import described
from shardlab.train.heartbeat import say
from shardlab.train.ramped import RampedExecutor
from shardlab.train.run import TrainingRun
from shardlab.train.saved import CHECKPOINTS
from shardlab.train.steps import Callback, StepResult, Training
from shardlab.train.world import versions

WISH = 0.5
"""Word by which rank 0 asks all ranks to save; other words are numbers of checkpoints."""


class Saver(Callback):
    """Callback that saves a run; all ranks call its methods at the same steps.

    What a rank has written it says in the exchange that every step makes; by it rank 0 knows when all have, and
    completes the checkpoint. There is one in flight at most: the next one waits for it.

    Args:
        executor: whose state is saved.
        run: settings of the run.
        batches: data of the run.

    Attributes:
        saved: the step of the last complete checkpoint, on rank 0.
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
        self._wished = False
        self._stalls: dict[int, float] = {}  # seconds for which steps stood still
        self._training: Training | None = None
        self.saved: int | None = executor.state.step or None

    @property
    def _state(self) -> State:
        return self._executor.state

    def on_begin(self, training: Training) -> None:
        """Note of which training every checkpoint keeps the loss before the first step."""
        self._training = training

    def on_step_end(self, training: Training) -> None:
        """Save, if it is due by the number of the step, or rank 0 has wished for it."""
        if self._wished or (self._steps is not None and self._state.step % self._steps == 0):
            self._stalls[self._state.step - 1] = self.save()

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        """Add the seconds for which a step's save stood still; after a run has diverged, drop what was saved later."""
        number = step.metrics["step"]
        if step.diverged:
            self._give_up(number)
        return {"save_stall": self._stalls.pop(number)} if number in self._stalls else {}

    def on_end(self, training: Training) -> None:
        """Save the run after its last step, or after the one at which it was interrupted, so that it can go on."""
        if self._step < self._state.step:
            self.save()
        self._end()

    def word(self) -> float:
        """Tell the number of the checkpoint that this rank has written, negative if it failed; or wish to save."""
        late = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        return WISH if late and self._state.rank == 0 and self._writing is None else self._written

    def on_words(self, words: Sequence[float]) -> None:
        """Take note of what each rank has told."""
        if words[0] == WISH:
            self._wished = True
        else:
            self._hear([int(word) for word in words])

    @property
    def _written(self) -> int:
        if self._writing is None or not self._writing.done():
            return 0
        return self._number if self._writing.exception() is None else -self._number

    def _hear(self, told: Sequence[int]) -> None:
        if self._writing is None or any(abs(number) != self._number for number in told):
            return
        error, self._writing = self._writing.exception(), None
        if error is not None:
            self._say_lost(self._step, error)
        if self._state.rank == 0:
            whole = all(number > 0 for number in told)
            end = partial(self._complete, documents=self._documents) if whole else self._drop
            self._pool.submit(end, self._step)

    def save(self) -> float:
        """Copy what this rank keeps, to be written from now on.

        Returns:
            the seconds that it took, for which the run stood still.
        """
        began = time.perf_counter()
        self.settle()
        self._snapshot = self._snapshot or Snapshot(self._state)
        taken = self._snapshot.take()
        self._number, self._step, self._began = self._number + 1, self._state.step, time.monotonic()
        self._wished = False
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
            told[self._state.rank] = self._written
            dist.all_reduce(told)
            self._hear([int(number) for number in told])

    def wait(self) -> None:
        """Wait until this rank has nothing more to do for a checkpoint."""
        wait([self._pool.submit(int)])

    def _give_up(self, finite: int) -> None:
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
        dist.barrier()  # rank 0 has completed the last checkpoint, or dropped it
        for part in (self._run.out / CHECKPOINTS).glob(f"*{PART}"):  # of a failed save, on a disk of this host's own
            with suppress(OSError):
                remove_shard(part, self._state.rank)
        with suppress(OSError):  # others are in it
            (self._run.out / CHECKPOINTS).rmdir()

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
        before = math.nan if self._training is None else self._training.validation_before
        return {
            "step": state.step,
            "loss_scale": [state.loss_scale.scale, state.loss_scale.calm],
            "data": {
                "sequence": position.sequence,
                "epochs": position.epochs,
                "identity": identity,
            },
            "validation_before": before if math.isfinite(before) else None,
            "program": self._fingerprint(state.checked.program),
            "products": rows_of(CHOICES),
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
            "folder": str(Path.cwd()),
            "threads": torch.get_num_threads(),
        }
