"""One rank's optimizer steps, and the callbacks that observe them.

`Training` runs the steps. Iterating over it yields a `StepResult` for each step. `Callback` is the base class of all
observers of a training: validation, checkpoints, records, and those of users.

The ranks exchange one message a step: the sum of a vector over all ranks. The vector holds the loss, whether a rank
wants to stop, and, in separate elements for each rank, its times, memory and gradient norm. The sum is asynchronous, so
a step's result is known only while the next step runs.

The functions at the end compute the figures in a line of `metrics.jsonl`; docs/training.md defines them.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.errors import error_text, suggest_name
from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.common.text import listed
from shardlab.common.user_code import at_line, line_of_error
from shardlab.execute.state import State
from shardlab.language import Refused, UserError
from shardlab.models import GPT, Blocks
from shardlab.models.model import count_parameters
from shardlab.models.tensors.attention import to_device
from shardlab.train.batches import Batches
from shardlab.train.checkpoint.read import Checkpoint
from shardlab.train.data import Corpus, Tokenizer
from shardlab.train.data.evaluation_text import count_first_token_bytes
from shardlab.train.data.stream import TokenRun
from shardlab.train.faults import is_lost
from shardlab.train.history import describe_saved
from shardlab.train.launch.interrupt import GRACE, WARNED_GRACE, StopRequest
from shardlab.train.launch.ranks import is_out_of_memory
from shardlab.train.run import TrainingRun
from shardlab.train.tracing import RampedExecutor


class Callback:
    """Observer of a training. Derive from it, and override the methods that you need.

    Every rank has its own copy of each callback. All ranks call the same methods in the same order at the same steps,
    so a method may communicate.
    """

    def on_begin(self, training: Training) -> None:
        """Run before the first step."""

    def on_step_end(self, training: Training) -> None:
        """Run as soon as this rank has taken a step. Its weights are updated; the step's figures are not known yet."""

    def needs_weights(self, step: int) -> bool:
        """Return whether `on_metrics` reads the weights after a step. If so, the next step waits for `on_metrics`.

        Args:
            step: number of the step, counted from 0.
        """
        return False

    def on_metrics(self, training: Training, step: StepResult) -> Mapping[str, float] | None:
        """Run once all ranks know the figures of a step. By then the next step runs, unless `needs_weights` is true.

        Returns:
            Further figures of the step. Those of rank 0 are recorded, shown and logged with the others.
        """

    def on_end(self, training: Training) -> None:
        """Run after the last step, or after the step at which the training was asked to end; never if it diverged."""

    def message(self) -> float:
        """Return a number that all ranks receive along with the figures of the step that has just been taken."""
        return 0.0

    def on_messages(self, messages: Sequence[float]) -> None:
        """Receive the number that each rank's `message` has returned, by rank."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, equal on all ranks.

    Attributes:
        metrics: number of the step, loss in nats per token, and the other figures in a line of metrics.jsonl.
        stopping: whether a rank was asked to stop.
        diverged: ranks whose loss or gradient is not finite; empty if the run skips such steps.
        not_finite: the value that is not finite, its step and its ranks, as text; empty if all values are finite.
        user_figures: the metrics that the user's callbacks have returned.
    """

    metrics: dict[str, Any]
    stopping: bool
    diverged: list[int]
    not_finite: str = ""
    user_figures: dict[str, float] = field(default_factory=dict[str, float])

    def check_user_figures(self, figures: Mapping[str, Any] | None, callback: str) -> dict[str, float]:
        """Return the figures of a user's callback as numbers.

        Args:
            figures: figures that the callback has returned.
            callback: name of the callback, for the error message.

        Raises:
            UserError: if a value is not a number, or its name is that of another figure of the step.
        """
        checked: dict[str, float] = {}
        if not isinstance(figures, Mapping | None):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UserError(
                f"on_metrics of the callback {callback} returned {figures!r:.100}; return a dictionary with a number "
                "for each name, or None"
            )
        for name, value in (figures or {}).items():
            clause = f"on_metrics of the callback {callback} returned {name!r}"
            if name in self.metrics:
                raise UserError(f"{clause}, which is already a figure of every step; give it another name")
            try:
                checked[name] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"{clause} with {value!r}, which is no number; return a number for each name") from None
        return checked


class UserCallback(Callback):
    """Callback that calls a user's callback. An error in it becomes a sentence with the line at fault.

    Args:
        callback: the user's callback.
    """

    def __init__(self, callback: Callback) -> None:
        self._callback, self._name = callback, type(callback).__name__

    def on_begin(self, training: Training) -> None:
        self._call("on_begin", training)

    def on_step_end(self, training: Training) -> None:
        self._call("on_step_end", training)

    def needs_weights(self, step: int) -> bool:
        return bool(self._call("needs_weights", step))

    def on_metrics(self, training: Training, step: StepResult) -> Mapping[str, float] | None:
        figures = step.check_user_figures(self._call("on_metrics", training, step, keys=step.metrics), self._name)
        step.user_figures.update(figures)
        return figures

    def on_end(self, training: Training) -> None:
        self._call("on_end", training)

    def message(self) -> float:
        number = self._call("message")
        try:
            return float(number)
        except (TypeError, ValueError):
            raise UserError(f"message of the callback {self._name} returned {number!r:.100}; return a number") from None

    def on_messages(self, messages: Sequence[float]) -> None:
        self._call("on_messages", messages)

    def _call(self, method: str, *arguments: Any, keys: Mapping[str, Any] | None = None) -> Any:
        """Call a method of the user's callback.

        Args:
            keys: figures by name. If the callback looked up an unknown name, the error suggests the nearest one.

        Raises:
            UserError: for an error in the callback. Errors about lost ranks and missing memory are raised as they are.
        """
        try:
            return getattr(self._callback, method)(*arguments)
        except (Refused, UserError):
            raise
        except Exception as error:
            if is_lost(error) or is_out_of_memory(error):
                raise
            hint = ""
            if isinstance(error, KeyError) and keys is not None and error.args[0] not in keys:
                hint = f"; {suggest_name(str(error.args[0]), keys)}"
            subject = f"the callback {self._name} failed in {method}{at_line(line_of_error(error))}"
            raise UserError(f"{subject}: {error_text(error)}{hint}") from error


class Display(Protocol):
    """Progress display of rank 0."""

    def say(self, text: str) -> None:
        """Print a text above the display."""

    def begin(self, activity: str) -> None:
        """Show an activity other than a step."""

    def show_validation(self, losses: Mapping[str, float]) -> None:
        """Show validation losses that were computed outside of the steps."""


class Training:
    """One rank's training: its optimizer steps, and the callbacks that observe them.

    Args:
        executor: executor of the rank's steps.
        run: settings of the run.
        stop: request to stop this rank.
        batches: training and validation data.
        callbacks: observers, in the order in which they are called.
        display: progress display of rank 0; None on the other ranks.
        checkpoint: checkpoint from which the run is resumed; None if it begins anew.

    Attributes:
        run, batches, callbacks, checkpoint: as above.
        validation_before: validation loss before the first step, in nats per token.
        stopped: whether a callback of this rank has called `stop`.
    """

    def __init__(
        self,
        executor: RampedExecutor,
        run: TrainingRun,
        stop: StopRequest,
        batches: Batches,
        callbacks: Sequence[Callback] = (),
        display: Display | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.run, self.batches, self.callbacks, self.checkpoint = run, batches, callbacks, checkpoint
        self.validation_before = math.nan
        self.stopped = False
        self._executor = executor
        self._stop = stop
        self._display = display
        self._bytes_per_token = bytes_per_token(batches.corpus)
        self._last_end = 0.0

    @property
    def state(self) -> State:
        """This rank's tensors: weights, optimizer states, number of the next step."""
        return self._executor.state

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self.state.rank

    @property
    def corpus(self) -> Corpus:
        """Training and validation text, and its tokenizer."""
        return self.batches.corpus

    @property
    def warned(self) -> bool:
        """Whether a rank has received a scheduler's warning that its time is nearly over."""
        return self._stop.warned

    @property
    def stopping(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._stop.is_requested

    def stop(self) -> None:
        """Ask all ranks to stop after the next step or the one after it. The run is saved, and can be resumed."""
        self._stop.is_requested = self.stopped = True

    def say(self, text: str) -> None:
        """Print a text on rank 0, above the progress display."""
        if self._display is not None:
            self._display.say(text)

    def begin(self, activity: str) -> None:
        """Show an activity other than a step, on rank 0."""
        if self._display is not None:
            self._display.begin(activity)

    def show_validation(self, losses: Mapping[str, float]) -> None:
        """Show validation losses on rank 0."""
        if self._display is not None:
            self._display.show_validation(losses)

    def start_clock(self) -> None:
        """Start the clock of the next step now, on all ranks together, since rank 0 may have done other work before."""
        dist.barrier()
        self._last_end = time.perf_counter()

    def __iter__(self) -> Iterator[StepResult]:
        """Run the steps, and yield the result of each while the next one runs already. All ranks yield the same steps.

        If a callback needs the weights after a step, the result is yielded before the next step begins. The last result
        is that of the run's last step, of the first step that diverged, or of the step after a rank asked to stop.
        """
        pending: tuple[int, Tensor, dist.Work | None] | None = None  # the last step, while its figures are summed
        self.start_clock()
        for step in range(self.state.step, self.run.config.train.steps):
            previous, pending = pending, (step, *self._step())
            for callback in self.callbacks:
                callback.on_step_end(self)
            if previous is not None:
                result = self._result(*previous)
                if result.diverged and pending[2] is not None:
                    pending[2].wait()  # so that no communication is in flight when the ranks end
                yield result
                if result.diverged:
                    return
                if result.stopping:
                    break
            if any(callback.needs_weights(step) for callback in self.callbacks):
                result, pending = self._result(*pending), None
                yield result
                if result.diverged or result.stopping:
                    return
                self.start_clock()
        if pending is not None:
            yield self._result(*pending)

    def _step(self) -> tuple[Tensor, dist.Work | None]:
        """Run a step, and start the all-reduce of its figures, from which `_result` reads the step's result.

        Returns:
            The vector that is being summed, and the handle of its all-reduce (None: there is one rank). The vector
            holds the loss (sum and tokens), the requests to stop (asked, warned), and a matrix with a column for each
            rank. The rows of the matrix are the code of what is not finite, the squared norm of the gradient (NaN if
            the rank does not know it), the figures of RANK_FIGURES, and the messages of the callbacks.
        """
        loss = self._executor.step()
        state = self.state
        device, rank = state.settings.device, state.rank
        measured = [*self._executor.read(), peak_memory(device)]
        began, self._last_end = self._last_end, time.perf_counter()
        messages = [callback.message() for callback in self.callbacks]
        rows = torch.zeros(2 + len(RANK_FIGURES) + len(messages), self.run.config.plan.ranks, dtype=loss.dtype)
        column = [_non_finite_code(loss, state), state.squared_norm, max(self._last_end - began, SHORTEST_SECONDS)]
        rows[:, rank] = torch.tensor([*column, *measured, *messages])
        requests = torch.tensor([self._stop.is_requested, self._stop.warned], dtype=loss.dtype)
        sums = torch.cat([loss, *(to_device(device, tensor) for tensor in (requests, rows.flatten()))])
        alone = self.run.config.plan.ranks == 1
        return sums, None if alone else cast(dist.Work, dist.all_reduce(sums, async_op=True))

    def _result(self, step: int, sums: Tensor, work: dist.Work | None) -> StepResult:
        """Wait for the sum over the ranks, and return the step's result."""
        if work is not None:
            work.wait()
        run = self.run
        total, tokens, stopping, warned = cast(list[float], sums[:4].tolist())
        codes, norms, *rows = cast(list[list[float]], sums[4:].view(-1, run.config.plan.ranks).tolist())
        known_norms = [norm for norm in norms if not math.isnan(norm)]
        spread = mean_min_max(rows[: len(RANK_FIGURES)])
        job, loss = run.job, total / max(1.0, tokens)
        sequences = run.config.train.ramp.microbatches(step) * job.micro_batch_size
        metrics = {
            "step": step,
            "loss": loss,
            "bits_per_byte": bits_per_byte(loss, self._bytes_per_token),
            "learning_rate": run.config.optimizer.rate(step),
            "grad_norm": math.sqrt(known_norms[0]) if known_norms else None,
            **spread,
            **speeds(job.model, sequences, spread["dt"], job.ranks, run.peak),
        }
        faults = [int(code) for code in codes]
        stops = run.config.train.non_finite == "stop"
        not_finite = _describe_non_finite(faults, step, run) if any(faults) else ""
        for callback, messages in zip(self.callbacks, rows[len(RANK_FIGURES) :], strict=True):
            callback.on_messages(messages)
        if stopping:
            grace = WARNED_GRACE if warned else GRACE
            self._stop.ask(grace)  # even if only another rank was asked: every rank has to end in time
        diverged = [rank for rank, code in enumerate(faults) if code and stops]
        return StepResult(metrics, stopping > 0, diverged, not_finite)


def divergence_error(run: TrainingRun, value: str) -> UserError:
    """Return the error for a value that is not finite. It says what has been saved, and what to try."""
    clip = run.config.optimizer.clip
    now = "--clip 1" if run.job.checked().clips else "--clip 1 with a plan"
    limit = now if clip is None else f"a --clip of less than {clip:g}"
    return UserError(
        f"{value} is not finite, so training has stopped; {describe_saved(run.out)}; "
        f"try a --learning-rate of less than {run.config.optimizer.learning_rate:g}, or {limit}"
    )


RANK_FIGURES = ("dt", "dtf", "dtb", "memory")
"""Figures that each rank measures. metrics.jsonl has their mean, minimum and maximum over the ranks."""

DECODED_TOKENS = 100_000
"""Number of tokens that are decoded to estimate the bytes per token of data that do not record them."""


def peak_memory(device: torch.device) -> int:
    """Return the peak so far in bytes: of the memory that torch allocated on a GPU, or of this process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # On Linux, getrusage would begin with the peak of the process that started this one.
    with suppress(OSError, IndexError), open("/proc/self/status", "rb", buffering=0) as status:
        return int(status.read().split(b"VmHWM:")[1].split(b"kB")[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def mean_min_max(ranks: Sequence[Sequence[float]]) -> dict[str, float]:
    """Return the mean, minimum and maximum over the ranks of each figure.

    Args:
        ranks: for each figure of RANK_FIGURES, its value on each rank.
    """
    return {
        name + suffix: figure
        for name, row in zip(RANK_FIGURES, ranks, strict=True)
        for suffix, figure in (("", math.fsum(row) / len(row)), ("_min", min(row)), ("_max", max(row)))
    }


def speeds(model: Blocks, sequences: int, dt: float, ranks: int, peak: float | None) -> dict[str, Any]:
    """Return sequences and tokens per second, in total and per rank, and the model FLOPs utilization (MFU).

    The MFU is None if the peak is not known, or if it comes out above 1, since the peak is then wrong.

    Args:
        model: the model that is trained.
        sequences: sequences of the global batch.
        dt: seconds of a step.
        ranks: number of ranks.
        peak: FLOP/s of all devices together, if known.
    """
    sps = sequences / dt
    tps = sps * model.seq_len
    mfu = None if peak is None else flops_per_token(model) * tps / peak
    return {
        "sps": sps,
        "sps_per_gpu": sps / ranks,
        "tps": tps,
        "tps_per_gpu": tps / ranks,
        "mfu": None if mfu is None or mfu > 1 else mfu,
    }


def flops_per_token(model: Blocks) -> float:
    """Return the FLOPs of a training step per token, 6 N + 12 L H Q T.

    N is the number of parameters without position embeddings, and without the experts that a token is not sent to. The
    L layers have H heads of Q features each, and attend to T tokens. Formula: nanoGPT's `estimate_mfu`, after Chowdhery
    et al. 2022, arXiv 2204.02311, appendix B.
    """
    top_k, experts = getattr(model, "top_k", 1), getattr(model, "experts", 1)
    routed = sum(
        parameter.numel
        for layer in range(model.layers)
        for parameter in model.layout(layer).parameters
        if ".experts." in parameter.name
    )
    parameters = count_parameters(model).without_positions - routed * (1 - top_k / experts)
    rotary = model.rope_dim // 2 if isinstance(model, GPT) and model.kv_rank else 0  # of queries and keys, not values
    width = model.heads * (model.head_size + rotary) if isinstance(model, GPT) else 0
    return 6.0 * parameters + 12.0 * model.layers * width * model.seq_len


def bytes_per_token(corpus: Corpus) -> float:
    """Return the bytes of text per predicted token of the training data: the mean over its sources, by share.

    Prepared data record the bytes of each part. Otherwise the first DECODED_TOKENS tokens are decoded.
    """
    stream = corpus.training
    ratios = [_bytes_per_token(run, corpus.tokenizer) for run in stream.runs]
    return sum(share * ratio for share, ratio in zip(stream.shares, ratios, strict=True)) / sum(stream.shares)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """Convert a loss from nats per token to bits per byte of text."""
    return loss / math.log(2) / bytes_per_token


def _non_finite_code(loss: Tensor, state: State) -> int:
    """Return a code for the value that is not finite on this rank.

    Returns:
        0 if all is finite, 1 for the loss, l + 2 for the gradient of layer l. If the gradient of every layer is finite
        but the norm of all of them is not: the number of layers + 2. With a scaled loss, gradients always have code 0,
        since the step is then skipped and the scale reduced.
    """
    if not loss.isfinite().all():
        return 1
    if state.finite or state.settings.precision.scaled:
        return 0
    return 2 + (state.model.layers if state.not_finite is None else state.not_finite)


def _describe_non_finite(codes: Sequence[int], step: int, run: TrainingRun) -> str:
    """Describe the lowest nonzero code of `_non_finite_code`, and name all ranks that have it."""
    lowest = min(code for code in codes if code)
    ranks = [rank for rank, code in enumerate(codes) if code == lowest]
    layer = f"gradient of layer {lowest - 2}" if lowest - 2 < run.job.cut.layers else "gradient's norm"
    quantity = "loss" if lowest == 1 else layer
    return f"the {quantity} of step {step + 1} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


def _bytes_per_token(run: TokenRun, tokenizer: Tokenizer) -> float:
    if run.sizes is None:
        tokens = np.asarray(run.tokens[:DECODED_TOKENS])
        return max(1, tokenizer.count_bytes(tokens)) / len(tokens)
    predicted = int(run.sizes.sum()) - count_first_token_bytes(run, tokenizer)
    return max(1, predicted) / (len(run.tokens) - run.documents)
