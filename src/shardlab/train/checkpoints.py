"""Saving a run while it trains, and resuming it.

`Saver` is the callback that saves. It copies what a rank keeps at the end of a step; a thread writes the copy while the
next steps run. `find_checkpoint` chooses and verifies the checkpoint from which a run is resumed, and `ResumedRun`
decides which settings may then differ. The format of checkpoints is in the package `checkpoint`.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardlab.common.errors import UserError
from shardlab.common.fields import split_interval
from shardlab.common.files import missing_path, path_from_here, read_file
from shardlab.common.text import counted, listed
from shardlab.common.user_code import file_from_here
from shardlab.execute.executor import Executor
from shardlab.execute.kernel_choice import rows_of
from shardlab.execute.state import State
from shardlab.models import Blocks
from shardlab.models.named import weights_at
from shardlab.models.tensors.compute import KERNEL_CHOICES
from shardlab.train.batches import Batches
from shardlab.train.checkpoint.contents import Snapshot, chunks_of, describe_layers, updates_of
from shardlab.train.checkpoint.read import CONFIG, STATE, Checkpoint
from shardlab.train.checkpoint.write import PART, Disk, commit, folder_of, part_of, remove_shard, steps_in, write_shard
from shardlab.train.config import TrainingConfig, with_default_schedule
from shardlab.train.config_sources import ConfigSource, file_source, model_of, saved_fields, saved_optimizer
from shardlab.train.history import CHECKPOINTS, METRICS, RECORD, WEIGHTS, has_finished, last_figures, require_free
from shardlab.train.huggingface.sources import recorded_model, require_same
from shardlab.train.job import job_as_dict
from shardlab.train.launch.commands import RankExchange
from shardlab.train.launch.interrupt import say
from shardlab.train.run import TrainingRun
from shardlab.train.steps import Callback, StepResult, Training
from shardlab.train.tracing import RampedExecutor
from shardlab.train.world import versions

SAVE_REQUEST = 0.5
"""Message by which rank 0 asks all ranks to save. All other messages are numbers of checkpoints (`Saver.message`)."""


class Saver(Callback):
    """Callback that saves a run. All ranks call its methods at the same steps.

    Each rank reports by `message` that it has written its part of a checkpoint. Once all ranks have, rank 0 completes
    the checkpoint. At most one checkpoint is in flight: the next one waits for it.

    Args:
        executor: executor whose state is saved.
        run: settings of the run.
        batches: data of the run.
        disk: disk to write to, which tests replace.

    Attributes:
        saved_step: step of the last complete checkpoint, on rank 0.
    """

    def __init__(
        self, executor: Executor | RampedExecutor, run: TrainingRun, batches: Batches, disk: Disk | None = None
    ) -> None:
        self._executor = executor
        self._run = run
        self._batches = batches
        self._disk = disk or Disk()
        self._steps, self._seconds = split_interval(run.config.saving.save_every)
        self._snapshot: Snapshot | None = None
        self._pool = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None  # write of this rank's file
        self._documents: dict[str, str] = {}
        self._number = 0  # number of saves so far, which identifies the checkpoint in flight
        self._step = executor.state.step
        self._began = time.monotonic()
        self._requested = False
        self._stalls: dict[int, float] = {}  # seconds for which the run was paused, by step
        self._training: Training | None = None
        self.saved_step: int | None = executor.state.step or None

    def on_begin(self, training: Training) -> None:
        """Remember the training: its loss before the first step is saved in each checkpoint."""
        self._training = training

    def on_step_end(self, training: Training) -> None:
        """Save if `save_every` is a number of steps and a save is due, or if rank 0 has requested one."""
        if self._requested or (self._steps is not None and self._state.step % self._steps == 0):
            self._stalls[self._state.step - 1] = self.save()

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        """Add the seconds for which a save paused the run. If a step diverged, drop a checkpoint that contains it.

        Returns:
            The figure `save_stall` if the step was saved.
        """
        number = step.metrics["step"]
        if step.diverged:
            self._abort(number)
        return {"save_stall": self._stalls.pop(number)} if number in self._stalls else {}

    def on_end(self, training: Training) -> None:
        """Save the run after its last step, or after the step at which it was interrupted."""
        if self._step < self._state.step:
            self.save()
        self._finish()

    def message(self) -> float:
        """Return this rank's message: SAVE_REQUEST, or the number of the checkpoint that it has written.

        The number is negative if writing failed, and 0 if no checkpoint is in flight or this rank still writes it.
        """
        late = self._seconds is not None and time.monotonic() - self._began >= self._seconds
        return SAVE_REQUEST if late and self._state.rank == 0 and self._writing is None else self._write_status

    def on_messages(self, messages: Sequence[float]) -> None:
        """Save after the next step if rank 0 requests it; otherwise complete the checkpoint if all have written it."""
        if messages[0] == SAVE_REQUEST:
            self._requested = True
        else:
            self._receive([int(message) for message in messages])

    def save(self) -> float:
        """Copy the state that this rank keeps, and start to write the copy.

        Returns:
            Seconds that the copy took. The run is paused for this time.
        """
        began = time.perf_counter()
        self.settle()
        self._snapshot = self._snapshot or Snapshot(self._state)
        copies = self._snapshot.take()
        self._number, self._step, self._began = self._number + 1, self._state.step, time.monotonic()
        self._requested = False
        if self._state.rank == 0:
            self._documents = {STATE: json.dumps(self._run_state()), CONFIG: self._run.config.as_toml()}
        note = {"tensors": {name: len(tensor) for name, tensor in copies.items()}, "updates": updates_of(self._state)}
        folder, rank = self._folder(self._step), self._state.rank
        self._writing = self._pool.submit(write_shard, self._disk, folder, rank, chunks_of(copies), note)
        return time.perf_counter() - began

    def settle(self) -> None:
        """Wait until all ranks have written the checkpoint in flight. Every rank calls this."""
        if self._writing is not None:
            wait([self._writing])
            numbers = torch.zeros(self._run.config.plan.ranks, dtype=torch.int64, device=self._state.settings.device)
            numbers[self._state.rank] = self._write_status
            dist.all_reduce(numbers)
            self._receive([int(number) for number in numbers])

    def wait(self) -> None:
        """Wait until this rank's thread has nothing left to do."""
        wait([self._pool.submit(int)])

    @property
    def _state(self) -> State:
        return self._executor.state

    @property
    def _write_status(self) -> int:
        if self._writing is None or not self._writing.done():
            return 0
        return self._number if self._writing.exception() is None else -self._number

    def _receive(self, numbers: Sequence[int]) -> None:
        """Complete the checkpoint in flight if all ranks have written it. `numbers` has each rank's `_write_status`."""
        if self._writing is None or any(abs(number) != self._number for number in numbers):
            return
        error, self._writing = self._writing.exception(), None
        if error is not None:
            self._say_lost(self._step, error)
        if self._state.rank == 0:
            complete = all(number > 0 for number in numbers)
            end = partial(self._complete, documents=self._documents) if complete else self._drop
            self._pool.submit(end, self._step)

    def _abort(self, finite: int) -> None:
        """Drop the checkpoint in flight if it contains the diverged step, and end the thread.

        Args:
            finite: number of steps before the diverged one.
        """
        if self._writing is not None and self._step > finite:
            wait([self._writing])
            self._writing = None
            dist.barrier()
            if self._state.rank == 0:
                self._drop(self._step)
        self._finish()

    def _finish(self) -> None:
        self.settle()
        self._pool.shutdown()
        dist.barrier()  # rank 0 has completed the last checkpoint, or dropped it
        # If hosts do not share a disk, a failed save has left its folder.
        for part in (self._run.out / CHECKPOINTS).glob(f"*{PART}"):
            with suppress(OSError):
                remove_shard(part, self._state.rank)
        with suppress(OSError):  # the folder may have checkpoints in it
            (self._run.out / CHECKPOINTS).rmdir()

    def _complete(self, step: int, documents: dict[str, str]) -> None:
        """Complete a checkpoint that all ranks have written; runs in the thread of rank 0."""
        try:
            commit(self._disk, self._folder(step), self._run.config.plan.ranks, documents, self._run.config.saving.keep)
        except Exception as error:  # exceptions of this thread are not read anywhere
            self._say_lost(step, error)
            self._drop(step)
        else:
            self.saved_step = step

    def _drop(self, step: int) -> None:
        with suppress(OSError):  # what remains is removed when the run is resumed
            self._disk.remove(part_of(self._folder(step)))

    def _folder(self, step: int) -> Path:
        return folder_of(self._run.out / CHECKPOINTS, step)

    def _say_lost(self, step: int, error: BaseException) -> None:
        if isinstance(error, OSError):
            trace, reason = "", (f"{error.filename}: " if error.filename else "") + (error.strerror or str(error))
        else:
            trace, reason = "".join(traceback.format_exception(error)), repr(error)
        say(
            f"{trace}shardlab: the checkpoint after step {step} cannot be written, and training goes on without it "
            f"(rank {self._state.rank}: {reason})"
        )

    def _run_state(self) -> dict[str, Any]:
        """Return the state of the run besides tensors. It has no random state: seed and step determine all draws."""
        state, batches = self._state, self._batches
        validation_before = math.nan if self._training is None else self._training.validation_before
        return {
            "step": state.step,
            "loss_scale": [state.loss_scale.scale, state.loss_scale.calm],
            "data": {
                "sequence": batches.sequences_before(state.step),
                "epochs": batches.epochs_before(state.step),
                "identity": batches.corpus.identity,
            },
            "validation_before": validation_before if math.isfinite(validation_before) else None,
            "program": state.checked.program.fingerprint(),
            "products": rows_of(KERNEL_CHOICES),
            **self._fixed,
        }

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """Entries that are the same in all checkpoints of a run."""
        return {
            "plan": self._run.job.title,
            "model": job_as_dict(self._run.job)["model"],
            "layers": describe_layers(self._state.model, self._state.shapes.flat),
            "versions": versions(),
            "folder": str(Path.cwd()),
            "threads": torch.get_num_threads(),
        }


SCHEDULE = {"learning_rate_schedule", "schedule_steps", "warmup_steps"}
"""Settings that determine the default length of the learning rate's decay."""

RATE = "schedule", "learning_rate", "min_learning_rate_ratio"
"""Attributes of `OptimizerConfig` that determine the learning rate of a step."""


def find_checkpoint(
    run: Path, step: int | None = None, *, auto: bool = False, together: RankExchange | None = None
) -> Checkpoint | None:
    """Open the newest checkpoint of a run, or the one after a given step, and compare the checksums of its files.

    The ranks of a launcher verify different files, and share what they find.

    Args:
        run: folder of the run.
        step: step of the checkpoint (None: the newest).
        auto: skip checkpoints that cannot be read. Rank 0 prints which ones.
        together: ranks of the launcher (None: this process is alone).

    Returns:
        The checkpoint. None if `auto` is set and the run has no checkpoint yet.

    Raises:
        UserError: if there is no such checkpoint, or it cannot be read. The message names the newest one that can.
    """
    checkpoints, together = run / CHECKPOINTS, together or RankExchange()
    listings = together.exchange(json.dumps(steps_in(Disk(), checkpoints)))  # another host may see new folders late
    steps: list[int] = json.loads(listings[0])
    if step is not None and step not in steps:
        alternatives = f"those after steps {listed(steps)}" if steps else "none"
        raise UserError(f"{run} has no checkpoint after step {step}; it has {alternatives}")
    model, broken = together.all(partial(_recorded_model, run)) if steps else None, None
    for number in [step] if step is not None else reversed(steps):
        try:
            checkpoint = together.all(partial(_open_verified, model, folder_of(checkpoints, number), together))
        except UserError as error:
            broken = broken or error
            if auto and together.rank == 0:
                say(f"shardlab: {error}; trying the checkpoint before")
            continue
        if broken is None or auto:
            return checkpoint
        raise UserError(f"{broken}; the checkpoint before is whole: shardlab train --resume {run} --from-step {number}")
    if broken is not None and not auto:
        raise UserError(f"{broken}; there is no whole checkpoint before")
    if auto and not steps:
        if weights_at(run / WEIGHTS):
            raise UserError(f"{run} has weights and no checkpoint, so it would be overwritten; name another with --out")
        return None
    if broken is not None:
        raise UserError(f"{run} has no checkpoint that can be read, and is left as it is; name another with --out")
    raise without_checkpoints(run, "complete checkpoint")


def without_checkpoints(run: Path, missing: str) -> UserError:
    """Return the error for a path that is not the folder of a run with checkpoints.

    Args:
        run: the path.
        missing: what the folder lacks, for the message.
    """
    if not run.is_dir():
        return missing_path(run, "name the folder of a run")
    if run.parent.name == CHECKPOINTS and (run.parents[1] / RECORD).is_file():
        step = run.name.removeprefix("step-").lstrip("0")
        return UserError(f"{run} is a checkpoint; name its run, {run.parents[1]}, and --from-step {step}")
    runs = sorted(run.glob(f"*/{RECORD}"), key=lambda path: path.stat().st_mtime)
    example = f", such as {runs[-1].parent}" if runs else ""
    return UserError(f"{run} has no {missing}; name the folder of a run{example}")


@dataclass(frozen=True)
class ResumedRun:
    """A run that is resumed from a checkpoint.

    Attributes:
        out: folder of the run.
        checkpoint: checkpoint from which the run is resumed.
        user_chose_checkpoint: whether the user has named the checkpoint.
    """

    out: Path
    checkpoint: Checkpoint
    user_chose_checkpoint: bool = False

    @classmethod
    def find(
        cls, out: Path, step: int | None = None, *, auto: bool = False, together: RankExchange | None = None
    ) -> ResumedRun | None:
        """Find the checkpoint from which the run in a folder is resumed.

        Args:
            out: folder of the run.
            step, auto, together: which checkpoint is chosen, and by which ranks; see `find_checkpoint`.

        Returns:
            The run. None if `auto` is set and the run has no checkpoint yet.

        Raises:
            UserError: if another process is at work in the folder, or no checkpoint can be used.
        """
        together = together or RankExchange()
        together.all(partial(require_free, out) if together.rank == 0 else lambda: None)
        checkpoint = find_checkpoint(out, step, auto=auto, together=together)
        return None if checkpoint is None else cls(out, checkpoint, step is not None)

    def source(self, launched: int | None, flags: Mapping[str, Any] | None = None) -> ConfigSource:
        """Return the settings of the run as a source of the new configuration.

        Relative paths are taken from the folder in which the run began. The learning-rate schedule stays as it was,
        even if the number of steps changes.

        Args:
            launched: number of ranks that a launcher has started (None: there is no launcher). With a launcher, the
                source leaves out the number of ranks, unless a plan determines it.
            flags: settings of the optimizer that flags change. If they change the schedule, its length or the warm-up,
                the source leaves out the length of the decay, unless the run had set it.
        """
        saved_config = self._saved_config
        plan = saved_config.sections["plan"]
        train = {name: value for name, value in saved_config.sections["train"].items() if name != "init"}
        optimizer = with_default_schedule(saved_fields(saved_config, "optimizer"), train["steps"])
        if SCHEDULE & set(flags or ()) and "decay_steps" not in saved_config.sections["optimizer"]:
            optimizer.pop("decay_steps", None)
        if launched is not None and "strategy" in plan:
            plan = {name: value for name, value in plan.items() if name != "ranks"}
        if "strategy" in plan:  # older versions had no passes, and did not record any
            plan = {"passes": "none", **plan}
        sections = {**saved_config.sections, "plan": plan, "train": train, "optimizer": optimizer}
        return ConfigSource(str(self.checkpoint.folder), sections)

    def config(self, requested: TrainingConfig) -> TrainingConfig:
        """Return the configuration with which the run is resumed: the requested one, with the `init` of the run.

        Raises:
            UserError: if a setting that cannot change differs: model, sequence length, optimizer, seed, frozen blocks,
                moving averages, or the number of sequences before the checkpoint.
        """
        saved_train = saved_fields(self._saved_config, "train")
        model = model_of([self.source(None)], 0)
        require_same(model, requested.model, self.checkpoint.folder)
        step = self.checkpoint.step
        fixed = {
            "--optimizer": (self._saved_config.sections["optimizer"]["optimizer"], requested.optimizer.optimizer),
            "--seed": (saved_train["seed"], requested.train.seed),
            "--seq-len": (model.seq_len, requested.model.seq_len),
            "--freeze": (_frozen(self._saved_config.sections["plan"]), _frozen(requested.plan.as_dict())),
            "--ema": (self._saved_config.sections["optimizer"].get("ema"), requested.optimizer.ema),
            f"sequences of the first {step} steps": (
                self.checkpoint.state["data"]["sequence"],
                requested.train.ramp.microbatches_before(step) * requested.train.micro_batch_size,
            ),
        }
        wrong = [f"{name}: {old} before, {new} now" for name, (old, new) in fixed.items() if old != new]
        if wrong:
            raise UserError(
                f"{'; '.join(wrong)}; a resumed run keeps this setting, so leave it out, or begin a new run with --init"
            )
        return replace(requested, train=replace(requested.train, init=saved_train.get("init")))

    @property
    def steps_taken(self) -> int:
        """Optimizer steps in the checkpoint named by the user, or else in the run's newest checkpoint or weights."""
        return self.checkpoint.step if self.user_chose_checkpoint else max(self.checkpoint.step, self._finished_steps)

    def has_ended(self, steps: int) -> bool:
        """Return whether a run of `steps` steps has nothing left to do.

        A run that was killed after its last step has not ended, because it has not written its weights.

        Raises:
            UserError: if the run has finished with weights that are newer than the checkpoint, which would be lost.
        """
        taken_step, finished = self.checkpoint.step, self._finished_steps
        if self.user_chose_checkpoint or finished <= taken_step:
            return steps < taken_step or (steps == taken_step and finished == taken_step)
        if steps <= finished:
            return True
        raise UserError(
            f"{self.out} has the weights after {counted(finished, 'step')}, but its newest checkpoint that can be read "
            f"is the one after step {taken_step}, so training on would begin there and overwrite them; give "
            f"--from-step {taken_step} if that is meant, or begin a new run with --init {self.out}"
        )

    def schedule_change(self, config: TrainingConfig) -> str:
        """Return a sentence on the learning rate from now on; empty if the steps and the rate are as before."""
        old_steps, old = saved_fields(self._saved_config, "train")["steps"], saved_optimizer(self._saved_config)
        new, step = config.optimizer, self.checkpoint.step
        has_same_rate = all(getattr(old, name) == getattr(new, name) for name in RATE)
        if config.train.steps == old_steps and has_same_rate:
            return ""
        rates = f"{old.rate(max(0, step - 1)):.3g} in step {step}, {new.rate(step):.3g} in step {step + 1}"
        if not has_same_rate:
            return f"learning rate: {old.schedule} before, {new.schedule} now ({rates})"
        steps, end = config.train.steps, new.schedule_steps
        stays = (
            f"; after {counted(end, 'step')} it stays at {new.rate(end):.3g} (--schedule-steps {steps} stretches it)"
        )
        return f"learning rate: {new.schedule} as before ({rates}){stays if end < steps else ''}"

    def require_same_data(self, identity: str) -> None:
        """Check that the data have not changed.

        Args:
            identity: identity of the data now (`Corpus.identity`).

        Raises:
            UserError: if they have changed.
        """
        if self.checkpoint.state["data"]["identity"] != identity:
            raise UserError(
                f"the data are no longer those that {self.out} was trained on; to continue with them, name them "
                "with --data"
            )

    @property
    def _finished_steps(self) -> int:
        """Number of optimizer steps after which the run finished and left its weights; 0 if it has not finished."""
        return int(last_figures(self.out / METRICS).get("step") or 0) + 1 if has_finished(self.out) else 0

    @cached_property
    def _saved_config(self) -> ConfigSource:
        """Settings in the checkpoint's configuration file, with paths changed to be valid in the current folder."""
        config = file_source(self.checkpoint.folder / CONFIG)
        folder, sections = self.checkpoint.state.get("folder"), {**config.sections}
        sections["data"] = {
            name: tuple(path_from_here(path, folder) for path in value) if name == "data" else value
            for name, value in config.sections["data"].items()
        }
        for section, name in (("model", "model"), ("plan", "strategy"), ("plan", "schedule")):
            if (value := config.sections[section].get(name)) is not None:
                sections[section] = {**sections[section], name: file_from_here(value, folder)}
        if (init := config.sections["train"].get("init")) is not None:
            sections["train"] = {**config.sections["train"], "init": Path(path_from_here(str(init), folder))}
        return ConfigSource(config.name, sections)


def _recorded_model(run: Path) -> Blocks | None:
    """Return the model in a run's record; None if the record is missing or damaged.

    Raises:
        UserError: if the record has no model, or one that no longer exists.
    """
    try:
        record = read_file(run / RECORD, "JSON")
    except UserError:
        return None
    try:
        return recorded_model(record, run / RECORD)
    except UserError as error:
        raise UserError(f"the model of {run} cannot be restored: {error}") from None


def _open_verified(model: Blocks | None, folder: Path, together: RankExchange) -> Checkpoint:
    """Open a checkpoint, and check that it is complete and has the model `model` (None: any model).

    Raises:
        UserError: if a check fails.
    """
    checkpoint = Checkpoint.open(folder).verify(together.rank, together.world)
    if model is not None:
        require_same(recorded_model(dict(checkpoint.state), folder / STATE), model, folder)
    return checkpoint


def _frozen(plan: Mapping[str, Any]) -> str:
    """Return the numbers of a plan's frozen blocks, in the form of the option --freeze."""
    return " ".join(map(str, sorted(plan.get("freeze", ())))) or "none"
