"""Training: one rank's loop, and what it is set up with."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch
from rich.console import Console
from torch import Tensor

from shardlab.execute import Executor, Settings
from shardlab.execute.transport.collectives import Groups
from shardlab.language import Kind, UserError
from shardlab.models.tensors.compute import choices
from shardlab.train.audit import Audit, Auditing
from shardlab.train.batches import Batches
from shardlab.train.callbacks import ProductKernels, Records, Sampling, TrainingProgress, Validation, Weights
from shardlab.train.checkpoint import Checkpoint
from shardlab.train.checkpoints import Saver
from shardlab.train.evaluate import Evaluation, InOrder
from shardlab.train.history import VALIDATION, saved_in
from shardlab.train.huggingface import initial_from
from shardlab.train.launch.interrupt import StopRequest
from shardlab.train.launch.ranks import backend_of
from shardlab.train.output import OutputFolder
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.steps import Callback, StepResult, Training, diverged
from shardlab.train.tracing import RampedExecutor
from shardlab.train.world import RunningWorld, agree, unseen

SEEN_WITHIN = 20.0
"""Seconds after which what one host writes is seen on another that shares its disk."""


def train_rank(rank: int, device: torch.device, run: TrainingRun) -> Summary | None:
    """Run one rank's part of a training; rank 0 writes the output folder and gives the summary.

    Raises:
        UserError: when a loss is not finite, or the folder cannot be made, or is not one folder for all ranks.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest(partial(saved_in, run.out) if rank == 0 else None))
        setup = RankSetup(rank, device, run)
        stack.enter_context(choices({} if setup.checkpoint is None else setup.checkpoint.products))
        folder = setup.shared_folder()
        executors = setup.executors()
        executor = RampedExecutor(executors, run, executors[run.job.microbatches].state.step)
        validation = Validation(run, setup.validation(executors[run.job.microbatches]))
        saver, weights = Saver(executor, run, setup.batches), Weights(run, executor.tracer)
        sampling = Sampling(run, validation)
        display = None
        if folder is not None:
            setup.world.print(Console(file=sys.stderr))
            display = stack.enter_context(TrainingProgress(run.config.train.steps, run.config.logging.log_every))
            setup.begin(folder)
        records = Records(run, folder, display, validation, weights)
        callbacks: list[Callback] = [
            *setup.auditing(executors.values()),  # before anything is saved
            ProductKernels(),
            saver,
            weights,
            validation,
            *run.callbacks.values,
            records,  # after all whose figures it records
            sampling,
        ]
        training = Training(executor, run, stop, setup.batches, callbacks, display, setup.checkpoint)
        if not fit(training):
            return None
        if rank == 0 and not math.isfinite(validation.losses[VALIDATION]):
            raise diverged(run, f"the validation loss after step {training.state.step}")
        return records.summary(training, sampling, saver.saved)


def fit(training: Training) -> bool:
    """Train to the last step, or until a rank is asked to end.

    `Training` runs the steps, each of which loads its batch, and calls `on_step_end`. It yields the figures of a step
    while the next step runs already.

    Returns:
        Whether the steps were finite, on ranks other than 0.

    Raises:
        UserError: on rank 0, when a step was not.
    """
    for callback in training.callbacks:
        callback.on_begin(training)
    for step in training:
        for callback in training.callbacks:
            figures = callback.on_metrics(training, step)
            _add_figures(training, step, callback, figures or {})
        if step.diverged and training.rank == 0:
            raise diverged(training.run, step.not_finite)
        if step.diverged:
            return False
    for callback in training.callbacks:
        callback.on_end(training)
    return True


def _add_figures(training: Training, step: StepResult, callback: Callback, figures: Mapping[str, float]) -> None:
    """Add the figures that a callback has returned to the metrics of a step."""
    if any(callback is each for each in training.run.callbacks.values):  # not by equality: users may define that
        figures = step.own_figures(figures, type(callback).__name__)
        step.own.update(figures)
    step.metrics.update(figures)


class RankSetup:
    """Data, checkpoint, folder and executors with which one rank's training begins.

    Args:
        rank, device: which rank, and where it computes.
        run: settings.

    Attributes:
        batches: data.
        world: all ranks.
        checkpoint: from which the run goes on, if it does.

    Raises:
        RuntimeError: when ranks have other programs, data or checkpoints than rank 0.
    """

    def __init__(self, rank: int, device: torch.device, run: TrainingRun) -> None:
        self._rank, self._device, self._run = rank, device, run
        job, corpus, ramp = run.job, run.corpus(), run.config.train.ramp
        self.batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed, ramp)
        self._checked = job.checked()
        others = {count: replace(job, microbatches=count).checked() for count in ramp.counts}
        self._proofs = others | {job.microbatches: self._checked}
        for proof in self._proofs.values():
            agree(proof, corpus.identity, str(run.resume))
        self.world = RunningWorld.gathered(rank, device, self._checked.program.mesh)
        self.checkpoint = None if run.resume is None else Checkpoint.open(run.resume)
        self._groups: Groups = {}

    def shared_folder(self) -> OutputFolder | None:
        """Make the run's folder on rank 0, and see that all ranks see it.

        Raises:
            UserError: when it cannot be made, or some rank does not see it.
        """
        run, folder = self._run, None
        if self._rank == 0:
            room = run.job.model.parameter_count * run.job.numbers.bytes(Kind.WEIGHT)
            step = self.checkpoint.step if self.checkpoint else 0
            folder = OutputFolder(run.out, room, since=step if run.again else None)
        if complaint := unseen(run.out, min(SEEN_WITHIN, run.config.train.timeout / 2)):
            if folder is not None:
                folder.abandon()
            raise UserError(complaint)
        return folder

    def executors(self) -> dict[int, Executor]:
        """Make the executors of one state, by number of microbatches; weights are the initial or the saved ones."""
        run, checked = self._run, self._checked
        job, train = run.job, run.config.train
        initial = blank if self.checkpoint else train.init and initial_from(train.init, job.cut)
        settings = Settings(
            job.seed,
            job.numbers,
            self._device,
            run.config.optimizer,
            initial,
            compile=train.compile,
            cuda_graph=train.cuda_graph,
        )
        needed = self._rank, job.cut, self.batches, settings, backend_of(self._device.type)
        executor = Executor(checked, *needed, groups=self._groups)
        if self.checkpoint is not None:
            self.checkpoint.restore(executor.state)
        return {
            count: executor if proof is checked else Executor(proof, *needed, groups=self._groups, of=executor.state)
            for count, proof in self._proofs.items()
        }

    def validation(self, executor: Executor) -> Evaluation:
        """Make the evaluation of an executor's weights on the validation text."""
        job, batches = self._run.job, self.batches
        sequences = InOrder(job.micro_batch_size, batches.validation_microbatches, job.microbatches, batches.validation)
        state = executor.state
        return Evaluation(job, self._checked, self._rank, self._device, sequences, of=state, groups=self._groups)

    def auditing(self, executors: Iterable[Executor]) -> list[Auditing]:
        """Make the callback that audits the ranks; none, unless the run says how often."""
        every = self._run.config.train.audit_every
        if every is None:
            return []
        return [Auditing([Audit(each) for each in executors], every, partial(saved_in, self._run.out))]

    def begin(self, folder: OutputFolder) -> None:
        """Write what is known of the run before its first step."""
        run, corpus = self._run, self.batches.corpus
        record = run.record(corpus, self._checked, self.world)
        folder.begin(record, run.config.as_toml(), self._checked, run.job.title, corpus.tokenizer)
        folder.log(run.config.logging, run.config.as_dict())


def blank(layer: int, length: int, ranges: Sequence[tuple[int, int]], dtype: torch.dtype) -> Tensor:
    """Weights that are not there yet: whatever a checkpoint did not fill in would be seen at the first step."""
    return torch.full((sum(stop - start for start, stop in ranges),), math.nan, dtype=dtype)
