"""Callbacks of every training: validation, samples, weights, and the records and display of rank 0."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import median

import torch

from shardlab.execute.products import choose_products
from shardlab.models.tensors import Choice
from shardlab.rules.pieces import counted
from shardlab.train.evaluate import Evaluation
from shardlab.train.heartbeat import say
from shardlab.train.output import OutputFolder
from shardlab.train.parallel_writer import ParallelWriter
from shardlab.train.printable import printable
from shardlab.train.progress import TrainingProgress
from shardlab.train.run import WARM_UP, Summary, TrainingRun
from shardlab.train.sample import continued, opening
from shardlab.train.saved import VALIDATION, VALIDATION_EMA
from shardlab.train.steps import Callback, StepResult, Training
from shardlab.train.tracing import TracedExecutor
from shardlab.train.weights import save_weights


class ProductKernels(Callback):
    """Choice of kernels for the products of the first step, which are the same on all ranks from the second one on."""

    def __init__(self) -> None:
        self._chosen = False

    def on_step_end(self, training: Training) -> None:
        """Choose after the first step, before it is saved. A run that is resumed has chosen already."""
        if not self._chosen and choose_products(training.state.settings.device):
            training.start_clock()
        self._chosen = True


class Validation(Callback):
    """Validation loss before the first step, after every so many, and in the end.

    Args:
        run: settings; they say how often.
        evaluation: computes it, on all ranks together.

    Attributes:
        losses: the last ones, by the names that records have for them, in nats per token.
    """

    def __init__(self, run: TrainingRun, evaluation: Evaluation) -> None:
        self._run, self._evaluation = run, evaluation
        self.losses: dict[str, float] = {VALIDATION: math.nan}

    def on_begin(self, training: Training) -> None:
        """Validate the first weights, unless the run is resumed: its checkpoint has that loss."""
        if training.checkpoint is not None:
            training.validation_before = training.checkpoint.validation_before
        else:
            training.begin("validation before training")
            training.validation_before = self._evaluation.loss().mean
            training.show_validation({VALIDATION: training.validation_before})

    def needs_weights(self, step: int) -> bool:
        """Return whether it is time; the run's last weights are validated in any case."""
        return self._run.is_due(self._run.config.logging.validate_every, step)

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        """Validate, if it is time, unless the run has to end within seconds."""
        if step.diverged or step.stopping or not self.needs_weights(step.metrics["step"]):
            return {}
        self.losses = self._evaluation.losses()
        return self.losses

    def on_end(self, training: Training) -> None:
        """Validate the last weights; the loss is not a number where weights are not."""
        training.begin("validation after training")
        self.losses = self._evaluation.losses()
        training.show_validation(self.losses)


class Sampling(Callback):
    """Text with which the model goes on from a prompt, after every so many steps and in the end.

    Args:
        run: settings; they say how often, and from which prompt.
        validation: knows whether the last weights are finite.

    Attributes:
        prompt: the user's, or a line of the validation text, once the training has begun.
        text: the last text, after the prompt.
    """

    def __init__(self, run: TrainingRun, validation: Validation) -> None:
        self._run, self._validation = run, validation
        self.prompt = b""
        self.text = ""

    def on_begin(self, training: Training) -> None:
        """Choose the prompt."""
        given = self._run.config.logging.prompt
        self.prompt = opening(training.corpus) if given is None else given.encode(errors="surrogateescape")

    def needs_weights(self, step: int) -> bool:
        """Return whether it is time; the run's last weights are sampled from in any case."""
        return self._run.is_due(self._run.config.logging.sample_every, step)

    def on_metrics(self, training: Training, step: StepResult) -> None:
        """Sample, if it is time, unless the run has to end within seconds."""
        if not step.diverged and not step.stopping and self.needs_weights(step.metrics["step"]):
            training.say(self._sampled(training))

    def on_end(self, training: Training) -> None:
        """Sample from the last weights, if they are finite."""
        if math.isfinite(self._validation.losses[VALIDATION]):
            training.begin("sample")
            self.text = self._sampled(training)

    def _sampled(self, training: Training) -> str:
        choice = Choice(seed=self._run.config.train.seed)
        writer = ParallelWriter(training.state, self._run.job.model, choice, lambda: training.stopping)
        return continued(writer.go_on, self.prompt, training.corpus.tokenizer)


class Weights(Callback):
    """Files of the last weights, and of the trace if steps are traced.

    Args:
        run: settings.
        tracer: records steps, if they are traced.

    Attributes:
        unwritten: names of files that could not be written.
    """

    def __init__(self, run: TrainingRun, tracer: TracedExecutor | None) -> None:
        self._run, self._tracer = run, tracer
        self.unwritten: list[str] = []

    def on_end(self, training: Training) -> None:
        """Write them, before anything that takes longer: a run that is interrupted has little time."""
        training.begin("writing the weights")
        self.unwritten = save_weights(training.state, self._run.out)
        if self._tracer is not None:
            self._tracer.finish()


class Records(Callback):
    """Records of each step, which rank 0 keeps: the run's folder, loggers and the display.

    Args:
        run: settings.
        folder, display: of the run, on rank 0; without them nothing is recorded.
        validation, weights: know the last losses, and what could not be written.

    Attributes:
        times: seconds of each step.
    """

    def __init__(
        self,
        run: TrainingRun,
        folder: OutputFolder | None,
        display: TrainingProgress | None,
        validation: Validation,
        weights: Weights,
    ) -> None:
        self._run, self._folder, self._display = run, folder, display
        self._validation, self._weights = validation, weights
        self.times: list[float] = []

    def on_begin(self, training: Training) -> None:
        """Say what begins, and where it goes on."""
        if self._display is None:
            return
        run, state = self._run, training.state
        ops = sum(map(len, state.checked.program.tapes))
        title = f"{run.job.title} on {counted(run.job.ranks, 'rank')}"
        say(f"{title}: {ops} ops checked, drawn in {run.out}/strategy.svg")
        if training.checkpoint is not None:
            say(f"resumed after step {state.step}, from {run.resume}")
            tell_threads(training.checkpoint.threads, state.settings.device)
        self._display.begin("first step")

    def on_metrics(self, training: Training, step: StepResult) -> None:
        """Record the figures of a step, those of other callbacks too, and show them."""
        self.times.append(step.metrics["dt"])
        if self._folder is None or self._display is None:
            return
        logs = self._run.logs(step.metrics["step"]) or bool(step.diverged)
        self._folder.write_metrics(step.metrics, pending=not logs)
        self._display.show(step.metrics, step.own)
        if step.diverged:
            self._close(self._folder, training, {VALIDATION: math.nan})
        elif step.not_finite:
            say(f"{step.not_finite} is not finite; the step is left out")

    def on_end(self, training: Training) -> None:
        """Plot the losses, and close the files."""
        if self._folder is not None:
            self._folder.note_unwritten(self._weights.unwritten)
            self._close(self._folder, training, self._validation.losses)

    def _close(self, folder: OutputFolder, training: Training, losses: dict[str, float]) -> None:
        folder.write_plot(training.validation_before, losses)
        folder.close()

    def summary(self, training: Training, sampling: Sampling, saved: int | None) -> Summary | None:
        """Return the results of the training on rank 0, and None on the others.

        Args:
            sampling: has the last sample.
            saved: step of the last checkpoint.
        """
        if self._folder is None:
            return None
        run, losses, times = self._run, self._validation.losses, self.times
        done = training.state.step
        began = done - len(times)
        times = times or [self._folder.last_dt]  # all steps had been taken
        since, microbatches = run.config.train.ramp.stage(done - 1)  # speeds are those of one batch, the last
        warm_up = min(max(WARM_UP, since - began), len(times) - 1)
        dt = median(times[warm_up:])
        return Summary(
            steps=done,
            epochs=training.batches.position(done).epochs,
            interrupted=done < run.config.train.steps,
            warned=training.warned,
            saved=saved,
            validation_before=training.validation_before,
            validation_after=losses[VALIDATION],
            validation_after_ema=losses.get(VALIDATION_EMA),
            warm_up=warm_up,
            dt=dt,
            tps=replace(run.job, microbatches=microbatches).tokens / dt,
            seconds=sum(times),
            prompt=printable(sampling.prompt.decode(errors="replace")),
            sample=sampling.text,
            out=str(run.out),
            unwritten=self._folder.unwritten,
        )


def tell_threads(before: int, device: torch.device) -> None:
    """Say that a run which is resumed differs in last bits where its ranks compute on another number of threads."""
    now = torch.get_num_threads()
    if device.type == "cpu" and now != before:
        say(
            f"each rank computes on {counted(now, 'thread')}, before on {before}, so numbers may differ in their last "
            f"bits; OMP_NUM_THREADS={before} keeps them"
        )
