"""Callbacks of every training: validation, samples, weights, and the records and display of rank 0.

`loop.train_rank` puts them into order. `Validation`, `Sampling` and `Weights` work on all ranks together. `Records`
collects their results on rank 0: it writes the output folder, and drives `TrainingProgress`, the display in the
terminal.
"""

from __future__ import annotations

import math
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from shardlab.common.text import counted, printable
from shardlab.common.user_code import in_notebook_cell
from shardlab.execute.kernel_choice import choose_products
from shardlab.models.tensors import TokenSampling
from shardlab.train.evaluate import Evaluation
from shardlab.train.history import VALIDATION, VALIDATION_EMA
from shardlab.train.launch import interrupt
from shardlab.train.launch.interrupt import Heartbeat, say
from shardlab.train.output import OutputFolder
from shardlab.train.run import WARM_UP, Summary, TrainingRun
from shardlab.train.sample import ParallelWriter, choose_prompt, continue_prompt
from shardlab.train.steps import Callback, StepResult, Training
from shardlab.train.tracing import TracedExecutor
from shardlab.train.weights import save_weights


class ProductKernels(Callback):
    """Callback that chooses the kernels of matrix products. From the second step on, all ranks use the same kernels."""

    def __init__(self) -> None:
        self._has_chosen = False

    def on_step_end(self, training: Training) -> None:
        """Choose after the first step, before the step is saved. A resumed run takes the choice from its checkpoint."""
        if not self._has_chosen and choose_products(training.state.settings.device):
            training.start_clock()
        self._has_chosen = True


class Validation(Callback):
    """Callback that computes the validation loss: at the beginning, after every `validate_every` steps, and at the end.

    Args:
        run: settings of the run.
        evaluation: evaluation that computes the loss, on all ranks together.

    Attributes:
        losses: last losses by their names in metrics.jsonl, in nats per token.
    """

    def __init__(self, run: TrainingRun, evaluation: Evaluation) -> None:
        self._run, self._evaluation = run, evaluation
        self.losses: dict[str, float] = {VALIDATION: math.nan}

    def on_begin(self, training: Training) -> None:
        """Compute the loss of the initial weights; in a resumed run, read it from the checkpoint."""
        if training.checkpoint is not None:
            training.validation_before = training.checkpoint.validation_before
        else:
            training.begin("validation before training")
            training.validation_before = self._evaluation.loss().mean
            training.show_validation({VALIDATION: training.validation_before})

    def needs_weights(self, step: int) -> bool:
        """Return whether a validation is due after a step. The run's last weights are validated in any case."""
        return self._run.is_due(self._run.config.logging.validate_every, step)

    def on_metrics(self, training: Training, step: StepResult) -> dict[str, float]:
        """Validate if that is due, unless the run has to stop within seconds."""
        if step.diverged or step.stopping or not self.needs_weights(step.metrics["step"]):
            return {}
        self.losses = self._evaluation.losses()
        return self.losses

    def on_end(self, training: Training) -> None:
        """Validate the last weights. The loss is NaN if weights are NaN."""
        training.begin("validation after training")
        self.losses = self._evaluation.losses()
        training.show_validation(self.losses)


class Sampling(Callback):
    """Callback that continues a prompt with the model, after every `sample_every` steps and after the last step.

    Args:
        run: settings of the run.
        validation: validation callback; its last loss tells whether the weights are finite.

    Attributes:
        prompt: the user's prompt, or a line of the validation text; empty before the training begins.
        text: the prompt and its continuation by the last weights; empty until the training ends.
    """

    def __init__(self, run: TrainingRun, validation: Validation) -> None:
        self._run, self._validation = run, validation
        self.prompt = b""
        self.text = ""

    def on_begin(self, training: Training) -> None:
        """Choose the prompt."""
        prompt = self._run.config.logging.prompt
        self.prompt = choose_prompt(training.corpus) if prompt is None else prompt.encode(errors="surrogateescape")

    def needs_weights(self, step: int) -> bool:
        """Return whether a sample is due after a step. The run's last weights are sampled in any case."""
        return self._run.is_due(self._run.config.logging.sample_every, step)

    def on_metrics(self, training: Training, step: StepResult) -> None:
        """Sample if that is due, unless the run has to stop within seconds."""
        if not step.diverged and not step.stopping and self.needs_weights(step.metrics["step"]):
            training.say(self._sample(training))

    def on_end(self, training: Training) -> None:
        """Sample from the last weights, if they are finite."""
        if math.isfinite(self._validation.losses[VALIDATION]):
            training.begin("sample")
            self.text = self._sample(training)

    def _sample(self, training: Training) -> str:
        choice = TokenSampling(seed=self._run.config.train.seed)
        writer = ParallelWriter(training.state, self._run.job.model, choice, lambda: training.stopping)
        return continue_prompt(writer.generate, self.prompt, training.corpus.tokenizer)


class Weights(Callback):
    """Callback that writes the last weights, and the trace if steps are traced.

    Args:
        tracer: executor that records steps; None if the run is not traced.

    Attributes:
        unwritten: names of the files that could not be written.
    """

    def __init__(self, tracer: TracedExecutor | None) -> None:
        self._tracer = tracer
        self.unwritten: list[str] = []

    def on_end(self, training: Training) -> None:
        """Write the files, before validation and samples: a run that is interrupted has little time."""
        training.begin("writing the weights")
        self.unwritten = save_weights(training.state, training.run.out)
        if self._tracer is not None:
            self._tracer.finish()


class Records(Callback):
    """Callback that records each step on rank 0: in the output folder, in loggers, and on the display.

    Args:
        folder, display: output folder and progress display of rank 0; None on the other ranks.
        validation: callback that has the last validation losses.
        weights: callback that has the names of the files that could not be written.

    Attributes:
        times: seconds of each step since the run began or was resumed, averaged over the ranks.
    """

    def __init__(
        self, folder: OutputFolder | None, display: TrainingProgress | None, validation: Validation, weights: Weights
    ) -> None:
        self._folder, self._display, self._validation, self._weights = folder, display, validation, weights
        self.times: list[float] = []

    def on_begin(self, training: Training) -> None:
        """Print what is trained, and the step from which a run is resumed."""
        if self._display is None:
            return
        run, state = training.run, training.state
        ops = sum(map(len, state.checked.program.tapes))
        title = f"{run.job.title} on {counted(run.job.ranks, 'rank')}"
        say(f"{title}: {ops} ops checked, drawn in {run.out}/strategy.svg")
        if training.checkpoint is not None:
            say(f"resumed after step {state.step}, from {run.resume}")
            warn_of_threads(training.checkpoint.threads, state.settings.device)
        self._display.begin("first step")

    def on_metrics(self, training: Training, step: StepResult) -> None:
        """Record and show the figures of a step, including those of other callbacks."""
        self.times.append(step.metrics["dt"])
        if self._folder is None or self._display is None:
            return
        logs = training.run.logs(step.metrics["step"]) or bool(step.diverged)
        self._folder.write_metrics(step.metrics, pending=not logs)
        self._display.show(step.metrics, step.user_figures)
        if step.diverged:
            self._folder.close()
        elif step.not_finite:
            say(f"{step.not_finite} is not finite; the step is left out")

    def on_end(self, training: Training) -> None:
        """Close the files."""
        if self._folder is not None:
            self._folder.unwritten.update(self._weights.unwritten)
            self._folder.close()

    def summary(self, training: Training, sampling: Sampling, saved_step: int | None) -> Summary | None:
        """Return the results of the training on rank 0, and None on the others.

        Args:
            training: the training that has ended.
            sampling: callback that has the last sample.
            saved_step: step of the last checkpoint, if there is one.
        """
        if self._folder is None:
            return None
        run, losses, times = training.run, self._validation.losses, self.times
        finished_steps = training.state.step
        first_step = finished_steps - len(times)
        times = times or [self._folder.last_dt]  # a resumed run may have no step left
        start, microbatches = run.config.train.ramp.stage(finished_steps - 1)  # speeds are those of the last batch size
        warm_up = min(max(WARM_UP, start - first_step), len(times) - 1)
        dt = median(times[warm_up:])
        return Summary(
            steps=finished_steps,
            epochs=training.batches.epochs_before(finished_steps),
            interrupted=finished_steps < run.config.train.steps and not training.stopped,
            warned=training.warned,
            saved=saved_step,
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
            unwritten=sorted(self._folder.unwritten),
        )


def warn_of_threads(previous_threads: int, device: torch.device) -> None:
    """Print a warning if the ranks of a resumed run compute on another number of threads than before."""
    threads = torch.get_num_threads()
    if device.type == "cpu" and threads != previous_threads:
        say(
            f"each rank computes on {counted(threads, 'thread')}, before on {previous_threads}, so numbers may differ "
            f"in their last bits; OMP_NUM_THREADS={previous_threads} keeps them"
        )


LINES = 10
"""Lines that a fast run prints if every step is logged. A slow run prints more."""

RECENT = 50
"""Number of recent steps from whose mean duration the time left is estimated."""


def figures(
    metrics: Mapping[str, Any], remaining: float | None = None, user_figures: Mapping[str, float] | None = None
) -> Iterator[str]:
    """Yield the figures of a step as text, the most important first. docs/training.md defines them.

    Args:
        metrics: line of metrics.jsonl.
        remaining: seconds until the final step of the run ends, if known.
        user_figures: figures that the user's callbacks have returned.
    """
    yield f"loss {math.nan if metrics['loss'] is None else metrics['loss']:.3f}"
    for name in (VALIDATION, VALIDATION_EMA):
        if name in metrics:
            yield f"{name.replace('_', ' ')} {metrics[name]:.3f}"
    yield f"lr {metrics['learning_rate']:.3g}"
    if metrics["grad_norm"] is not None:
        yield f"norm {metrics['grad_norm']:.3g}"
    yield f"tps {metrics['tps']:,.0f}"
    if remaining is not None:
        yield f"left {clock(remaining)}"
    for name, figure in (user_figures or {}).items():
        yield f"{name.replace('_', ' ')} {figure:.4g}"
    yield f"dt {metrics['dt']:.3f}"
    if metrics["mfu"] is not None:
        yield f"mfu {metrics['mfu']:.1%}"
    yield f"dtf {metrics['dtf']:.3f} dtb {metrics['dtb']:.3f}"
    yield f"sps {metrics['sps']:.1f}"
    yield f"sps_per_gpu {metrics['sps_per_gpu']:.1f} tps_per_gpu {metrics['tps_per_gpu']:,.0f}"


def clock(seconds: float) -> str:
    """Format a duration in seconds as a clock does.

    >>> clock(7.2), clock(3725)
    ('0:07', '1:02:05')
    """
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def fit_into(pieces: Iterator[str], width: int | None) -> str:
    """Join as many pieces into a line as fit into `width` columns. The first piece is never left out.

    >>> fit_into(iter(["step 1", "loss 2.000", "norm 3"]), 17), fit_into(iter(["step 1"]), 3)
    ('step 1 loss 2.000', 'step 1')
    """
    line = next(pieces, "")
    for piece in pieces:
        if width is not None and len(line) + 1 + len(piece) > width:
            break
        line += f" {piece}"
    return line


class TrainingProgress:
    """Display of a run's progress on stderr, as a context manager.

    It prints a line for each step that is logged or validated. If `log_every` is 1, it prints only about LINES of the
    logged steps, and more if steps are slow. In a terminal, a live line with the newest step and a bar are shown below.

    Args:
        steps: number of steps of the run.
        log_every: number of steps from one logged step to the next.
        silence: seconds without output after which a line is printed into a pipe (None: `interrupt.SILENCE`). If the
            last line is older than half of this time, the next step prints a line in any case.
        console: console to print to (None: stderr).
        past_steps: number of steps that were done before the run was resumed.
    """

    def __init__(
        self,
        steps: int,
        log_every: int = 1,
        silence: float | None = None,
        console: Console | None = None,
        past_steps: int = 0,
    ) -> None:
        self._steps = steps
        self._interval = log_every if log_every > 1 else max(1, steps // LINES)
        self._thinned = log_every == 1
        self._silence = interrupt.SILENCE if silence is None else silence
        self._printed = time.monotonic()
        self._ends: deque[tuple[int, float]] = deque(maxlen=RECENT)
        self._count = past_steps
        self._doing = "starting"
        self._user_figures: Mapping[str, float] = {}
        self._metrics: Mapping[str, Any] | None = None
        self._console = console or Console(file=sys.stderr)
        live = self._console.is_interactive and not in_notebook_cell()
        self._lines = None if live else Heartbeat("starting", self._silence)
        self._live = Live(self, console=self._console, transient=True, refresh_per_second=4)

    def __enter__(self) -> TrainingProgress:
        (self._lines or self._live).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        (self._lines or self._live).__exit__(None, None, None)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield one line with the newest step or the current activity, and a bar."""
        width, doing = options.max_width, self._doing
        metrics = None if doing else self._metrics
        line = self._line({}, doing) if metrics is None else self._line(metrics, width=width)
        yield Text(line, no_wrap=True, overflow="crop")
        share = f"{self._count / max(1, self._steps):4.0%}"
        bar = Table.grid(expand=True, padding=(0, 1, 0, 0))
        bar.add_column(ratio=1)
        bar.add_column(width=len(share))
        bar.add_row(ProgressBar(self._steps, self._count), share)
        yield bar

    def begin(self, activity: str) -> None:
        """Show an activity until the next step has ended."""
        self._doing = activity
        if self._lines is not None:
            self._lines.doing = activity

    def say(self, text: str) -> None:
        """Print a text of any number of lines above the live display."""
        if self._lines is not None:
            self._lines.say(text)
        else:
            self._console.print(text, markup=False, highlight=False)

    def show_validation(self, losses: Mapping[str, float]) -> None:
        """Print validation losses that were computed outside of the steps."""
        self.say(self._line({}, *(f"{name.replace('_', ' ')} {loss:.3f}" for name, loss in losses.items())))

    def show(self, metrics: dict[str, Any], user_figures: Mapping[str, float] | None = None) -> None:
        """Show the figures of a step that has ended. The next step is running by then.

        Args:
            metrics: line of metrics.jsonl.
            user_figures: the metrics that the user's callbacks have returned.
        """
        now = time.monotonic()
        self._user_figures = user_figures or {}
        self._metrics, self._count, self._doing = metrics, metrics["step"] + 1, ""
        self._ends.append((self._count, now))
        late = (self._thinned or self._lines is not None) and now - self._printed >= self._silence / 2
        if self._count in (1, self._steps) or self._count % self._interval == 0 or VALIDATION in metrics or late:
            self.say(self._line(metrics, width=None if self._lines is not None else self._console.width))
            self._printed = now
        if self._lines is not None:
            self._lines.doing = f"step {self._count + 1:>5}/{self._steps}"

    def _line(self, metrics: Mapping[str, Any], *words: str, width: int | None = None) -> str:
        """Return a line with the number of the step, followed by its figures or by some words."""
        pieces = figures(metrics, self._estimate_remaining(metrics), self._user_figures) if metrics else iter(words)
        head = f"step {self._count:>5}/{self._steps} "
        return fit_into(iter([head, *pieces]), width)

    def _estimate_remaining(self, metrics: Mapping[str, Any]) -> float:
        """Estimate the seconds to the end of the last step from the recent steps, including the work between them."""
        (first_step, start), (last_step, end) = self._ends[0], self._ends[-1]
        pace = (end - start) / (last_step - first_step) if last_step > first_step else metrics["dt"]
        return pace * (self._steps - self._count)
