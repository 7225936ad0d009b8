"""The training of one rank, from set-up to summary. Start reading the package here.

`train_rank` builds everything that a rank needs and chooses the order of the callbacks. `fit` is the training loop.
`RankSetup` opens the data and the checkpoint, makes the output folder, and builds the executors of the program.

The loop itself knows only steps and callbacks. Saving, validation, sampling, records and audits are callbacks; they are
in `checkpoints.py`, `callbacks.py` and `audit.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.execute.transport.collectives import Groups
from shardlab.language import Kind, UserError
from shardlab.models.tensors.compute import kernel_choices
from shardlab.train.audit import Audit, Auditing
from shardlab.train.batches import Batches
from shardlab.train.callbacks import ProductKernels, Records, Sampling, TrainingProgress, Validation, Weights
from shardlab.train.checkpoint.read import Checkpoint
from shardlab.train.checkpoints import Saver
from shardlab.train.evaluate import Evaluation, OrderedBatches
from shardlab.train.history import VALIDATION, describe_saved
from shardlab.train.huggingface.sources import initial_from
from shardlab.train.launch.interrupt import StopRequest
from shardlab.train.launch.ranks import backend_of
from shardlab.train.output import OutputFolder
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.steps import Callback, Training, UserCallback, divergence_error
from shardlab.train.tracing import RampedExecutor
from shardlab.train.world import RunningWorld, ranks_without_folder, require_agreement

SEEN_WITHIN = 20.0
"""Seconds after which a file that one host has written is visible on another host that shares its disk."""


def train_rank(rank: int, device: torch.device, run: TrainingRun) -> Summary | None:
    """Run one rank's part of a training. Rank 0 writes the output folder.

    Returns:
        The summary of the run on rank 0, None on the other ranks.

    Raises:
        UserError: if a loss is not finite, the folder cannot be made, or the ranks do not share one folder.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(partial(describe_saved, run.out) if rank == 0 else None))
        setup = RankSetup(rank, device, run)
        stack.enter_context(kernel_choices({} if setup.checkpoint is None else setup.checkpoint.products))
        folder = setup.make_folder()
        executors = setup.make_executors()
        executor = RampedExecutor(executors, run, executors[run.job.microbatches].state.step)
        validation = Validation(run, setup.make_evaluation(executors[run.job.microbatches]))
        saver, weights = Saver(executor, run, setup.batches), Weights(executor.tracer)
        sampling = Sampling(run, validation)
        display = None
        if folder is not None:
            setup.world.print(Console(file=sys.stderr))
            display = stack.enter_context(
                TrainingProgress(run.config.train.steps, run.config.logging.log_every, past_steps=executor.state.step)
            )
            setup.write_records(folder)
        records = Records(folder, display, validation, weights)
        callbacks: list[Callback] = [
            *setup.make_auditing(executors.values()),  # before anything is saved
            ProductKernels(),
            saver,
            weights,
            validation,
            *map(UserCallback, run.callbacks.values),
            records,  # after the callbacks whose figures it records
            sampling,
        ]
        training = Training(executor, run, stop, setup.batches, callbacks, display, setup.checkpoint)
        if not fit(training):
            return None
        if rank == 0 and not math.isfinite(validation.losses[VALIDATION]):
            raise divergence_error(run, f"the validation loss after step {training.state.step}")
        return records.summary(training, sampling, saver.saved_step)


def fit(training: Training) -> bool:
    """Train to the last step, or until a rank is asked to stop.

    Iterating over `training` runs the steps. Each step loads its batch and calls `on_step_end` of the callbacks. The
    result of a step arrives while the next step runs already.

    Returns:
        True if the training came to its end, False if it diverged.

    Raises:
        UserError: on rank 0, if the training diverged.
    """
    for callback in training.callbacks:
        callback.on_begin(training)
    for step in training:
        for callback in training.callbacks:
            step.metrics.update(callback.on_metrics(training, step) or {})
        if step.diverged and training.rank == 0:
            raise divergence_error(training.run, step.not_finite)
        if step.diverged:
            return False
    for callback in training.callbacks:
        callback.on_end(training)
    return True


class RankSetup:
    """Data, checkpoint, output folder and executors with which one rank's training begins.

    Args:
        rank, device: number of the rank, and the device on which it computes.
        run: settings of the run.

    Attributes:
        batches: training and validation data.
        world: hosts and devices of all ranks.
        checkpoint: checkpoint from which the run is resumed; None if it begins anew.

    Raises:
        RuntimeError: if the program, the data or the checkpoint of a rank differ from those of rank 0.
    """

    def __init__(self, rank: int, device: torch.device, run: TrainingRun) -> None:
        self._rank, self._device, self._run = rank, device, run
        job, corpus, ramp = run.job, run.corpus(), run.config.train.ramp
        self.batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed, ramp)
        self._checked = job.checked()
        programs = {count: replace(job, microbatches=count).checked() for count in ramp.counts}
        self._programs = programs | {job.microbatches: self._checked}  # by number of microbatches
        for checked in self._programs.values():
            require_agreement(checked, corpus.identity, str(run.resume))
        self.world = RunningWorld.gather(rank, device, self._checked.program.mesh)
        self.checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
        self._groups: Groups = {}

    def make_folder(self) -> OutputFolder | None:
        """Make the run's folder on rank 0, and check that all ranks see it.

        Returns:
            The folder on rank 0, None on the other ranks.

        Raises:
            UserError: if the folder cannot be made, or a rank does not see it.
        """
        run, folder = self._run, None
        if self._rank == 0:
            weight_bytes = run.job.model.parameter_count * run.job.numbers.bytes(Kind.WEIGHT)
            step = self.checkpoint.step if self.checkpoint else 0
            folder = OutputFolder(run.out, weight_bytes, step=step if run.continues else None)
        if problem := ranks_without_folder(run.out, min(SEEN_WITHIN, run.config.train.timeout / 2)):
            if folder is not None:
                folder.abandon()
            raise UserError(problem)
        return folder

    def make_executors(self) -> dict[int, Executor]:
        """Make an executor for each number of microbatches. They share one state: the initial or the saved weights."""
        run, checked = self._run, self._checked
        job, train = run.job, run.config.train
        initial = unfilled_weights if self.checkpoint else train.init and initial_from(train.init, job.cut)
        settings = Settings(
            job.seed,
            job.numbers,
            self._device,
            run.config.optimizer,
            initial,
            compile=train.compile,
            cuda_graph=train.cuda_graph,
        )
        arguments = self._rank, job.cut, self.batches, settings, backend_of(self._device.type)
        executor = Executor(checked, *arguments, groups=self._groups)
        if self.checkpoint is not None:
            self.checkpoint.restore(executor.state)
        return {
            count: executor
            if program is checked
            else Executor(program, *arguments, groups=self._groups, weights_of=executor.state)
            for count, program in self._programs.items()
        }

    def make_evaluation(self, executor: Executor) -> Evaluation:
        """Make the evaluation of an executor's weights on the validation text."""
        job, data = self._run.job, self.batches
        sequences = OrderedBatches(
            job.micro_batch_size, data.validation_microbatches, job.microbatches, data.validation
        )
        state = executor.state
        return Evaluation(
            job, self._checked, self._rank, self._device, sequences, weights_of=state, groups=self._groups
        )

    def make_auditing(self, executors: Iterable[Executor]) -> list[Auditing]:
        """Make the callback that audits the ranks; none unless `audit_every` is set."""
        interval = self._run.config.train.audit_every
        if interval is None:
            return []
        return [Auditing([Audit(executor) for executor in executors], interval, partial(describe_saved, self._run.out))]

    def write_records(self, folder: OutputFolder) -> None:
        """Write the files that are complete before the first step: record, configuration, drawing and tokenizer."""
        run, corpus = self._run, self.batches.corpus
        record = run.record(corpus, self._checked, self.world)
        folder.begin(record, run.config.as_toml(), self._checked, run.job.title, corpus.tokenizer)
        folder.log(run.config.logging, run.config.as_dict())


def unfilled_weights(layer: int, length: int, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Return weights that are NaN: the first step would diverge if a checkpoint did not fill in all of them."""
    return torch.full((sum(stop - start for start, stop in ranges),), math.nan, dtype=dtype)
