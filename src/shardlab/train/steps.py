"""One rank's optimizer steps, and the callbacks that observe them."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.fields import TICK
from shardlab.execute.state import State
from shardlab.language import UserError
from shardlab.language.rules.kinds import listed
from shardlab.models import Blocks
from shardlab.models.model import count_parameters
from shardlab.models.tensors.attention import sent_to
from shardlab.train.data import Corpus, Tokenizer
from shardlab.train.data.evaluation_text import first_bytes
from shardlab.train.data.stream import TokenRun
from shardlab.train.history import saved_in
from shardlab.train.launch.interrupt import GRACE, WARNED_GRACE, StopRequest
from shardlab.train.run import TrainingRun

if TYPE_CHECKING:
    from shardlab.train.batches import Batches
    from shardlab.train.callbacks import TrainingProgress
    from shardlab.train.checkpoint import Checkpoint


class Stepping(Protocol):
    """Executor of a rank's steps, which also measures them."""

    @property
    def state(self) -> State:
        """The rank's tensors, as the last step has left them."""
        ...

    def step(self) -> Tensor:
        """Run a step as `Executor.step` does."""
        ...

    def read(self) -> tuple[float, float]:
        """Return the seconds of forward and backward passes since the last reading."""
        ...


class Callback:
    """Observer of a training, on every rank of it.

    Every rank has a copy of each callback, and calls their methods in the same order at the same steps, so that a
    method may communicate. While all ranks learn the figures of a step, the next step runs already.
    """

    def on_begin(self, training: Training) -> None:
        """The first step comes next."""

    def on_step_end(self, training: Training) -> None:
        """This rank has taken a step. Its weights are those after the step; its figures are not known yet."""

    def needs_weights(self, step: int) -> bool:
        """Return whether `on_metrics` reads the weights after a step; the next step then waits for it.

        Args:
            step: counted from 0.
        """
        return False

    def on_metrics(self, training: Training, step: StepResult) -> Mapping[str, float] | None:
        """All ranks know the figures of a step.

        Returns:
            Further figures of the step. Those of rank 0 are recorded, shown and logged with the others.
        """

    def on_end(self, training: Training) -> None:
        """The last step has been taken, or the training was asked to end; it has not diverged."""

    def word(self) -> float:
        """Return a number that all ranks get to know with the figures of the step that has just been taken."""
        return 0.0

    def on_words(self, words: Sequence[float]) -> None:
        """Each rank's number of a step is known, by rank."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step, as all ranks know it.

    Attributes:
        metrics: number, loss in nats per token, and the rest of a line of metrics.jsonl.
        stopping: whether a rank was asked to stop.
        diverged: ranks that reported a loss or gradient that is not finite, if that stops the run.
        not_finite: what is not finite, in which step and on which ranks; nothing if all is.
        own: figures among the metrics that the user's callbacks have returned.
    """

    metrics: dict[str, Any]
    stopping: bool
    diverged: list[int]
    not_finite: str = ""
    own: dict[str, float] = field(default_factory=dict[str, float])

    def own_figures(self, figures: Mapping[str, Any], callback: str) -> dict[str, float]:
        """Return the figures of a user's callback as numbers.

        Args:
            callback: its name, for an error.

        Raises:
            UserError: when one is no number, or has the name of another figure of the step.
        """
        found: dict[str, float] = {}
        for name, value in figures.items():
            where = f"on_metrics of the callback {callback} returned {name!r}"
            if name in self.metrics:
                raise UserError(f"{where}, which is already a figure of every step; give it another name")
            try:
                found[name] = float(value)
            except (TypeError, ValueError):
                raise UserError(f"{where} with {value!r}, which is no number; return a number for each name") from None
        return found


class Training:
    """One rank's training: its optimizer steps, and the callbacks that observe them.

    Args:
        executor: of the rank's tape or tapes, perhaps traced.
        run: settings.
        stop: whether this rank is asked to stop.
        batches: data.
        callbacks: observers, in the order in which they are called.
        display: progress display of rank 0; None on the other ranks.
        checkpoint: from which the run goes on, if it does.

    Attributes:
        run, batches, callbacks, checkpoint: as above.
        validation_before: validation loss before the first step, in nats per token.
    """

    def __init__(
        self,
        executor: Stepping,
        run: TrainingRun,
        stop: StopRequest,
        batches: Batches,
        callbacks: Sequence[Callback] = (),
        display: TrainingProgress | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        self.run, self.batches, self.callbacks, self.checkpoint = run, batches, callbacks, checkpoint
        self.validation_before = math.nan
        self._executor = executor
        self._stop = stop
        self._display = display
        self._bytes_per_token = bytes_per_token(batches.corpus)
        self._ended = 0.0

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
        """Whether a rank has had a scheduler's warning."""
        return self._stop.warned

    @property
    def stopping(self) -> bool:
        """Whether this rank was asked to end."""
        return self._stop.asked

    def stop(self) -> None:
        """Ask all ranks to end after the next step or the one after it; the run is saved, and can be resumed."""
        self._stop.asked = True

    def say(self, text: str) -> None:
        """Print a text on rank 0, above the progress display."""
        if self._display is not None:
            self._display.say(text)

    def begin(self, what: str) -> None:
        """Show on rank 0 what is under way beside steps."""
        if self._display is not None:
            self._display.begin(what)

    def show_validation(self, losses: Mapping[str, float]) -> None:
        """Show validation losses on rank 0."""
        if self._display is not None:
            self._display.validated(losses)

    def start_clock(self) -> None:
        """Begin to count the next step's time, on all ranks together, since rank 0 may have been at work."""
        dist.barrier()
        self._ended = time.perf_counter()

    def __iter__(self) -> Iterator[StepResult]:
        """Train, giving each step while the next one runs; the same steps on every rank.

        A step after which a callback needs the weights is given before the next one runs, and all ranks wait until
        the callbacks have seen it. The last step given is the run's last, or the first that diverged, or the one
        after a rank wished to stop.
        """
        pending: tuple[int, Tensor, dist.Work] | None = None  # the last step, whose figures are being summed
        self.start_clock()
        for step in range(self.state.step, self.run.config.train.steps):
            previous, pending = pending, (step, *self._step())
            for callback in self.callbacks:
                callback.on_step_end(self)
            if previous is not None:
                result = self._result(*previous)
                if result.diverged:
                    pending[2].wait()  # nothing stays in flight, although nobody asks for more
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

    def _step(self) -> tuple[Tensor, dist.Work]:
        """One step, and the sum over the ranks that has it all.

        That is the loss, the wish to stop, and for each rank what is not finite, the gradient's norm if it knows it,
        its own figures, and the words of its callbacks.
        """
        loss = self._executor.step()
        state = self.state
        device, rank = state.settings.device, state.rank
        own = [*self._executor.read(), memory_of(device)]
        began, self._ended = self._ended, time.perf_counter()
        words = [callback.word() for callback in self.callbacks]
        flags = torch.zeros(2 + len(SPREAD) + len(words), self.run.config.plan.ranks, dtype=loss.dtype)
        found = [_flag(loss, state), state.squared_norm, max(self._ended - began, TICK), *own, *words]
        flags[:, rank] = torch.tensor(found)
        wishes = torch.tensor([self._stop.asked, self._stop.warned], dtype=loss.dtype)
        sums = torch.cat([loss, *(sent_to(device, each) for each in (wishes, flags.flatten()))])
        return sums, cast(dist.Work, dist.all_reduce(sums, async_op=True))

    def _result(self, step: int, sums: Tensor, work: dist.Work) -> StepResult:
        """Wait for the sum over the ranks, and make the result of the step of it."""
        work.wait()
        run, sums = self.run, sums.cpu()
        total, tokens, stopping, warned = (float(figure) for figure in sums[:4])
        diverged, norms, *rows = sums[4:].view(-1, run.config.plan.ranks)
        known = norms[~norms.isnan()]
        spread = spreads(torch.stack(rows[: len(SPREAD)]))
        job, loss = run.job, total / max(1.0, tokens)
        sequences = run.config.train.ramp.microbatches(step) * job.micro_batch_size
        metrics = {
            "step": step,
            "loss": loss,
            "bits_per_byte": bits_per_byte(loss, self._bytes_per_token),
            "learning_rate": run.config.optimizer.rate(step),
            "grad_norm": math.sqrt(known[0]) if len(known) else None,
            **spread,
            **speeds(job.model, sequences, spread["dt"], job.ranks, run.peak),
        }
        flags = [int(flag) for flag in diverged]
        stops = run.config.train.non_finite == "stop"
        what = _not_finite(flags, step, run) if any(flags) else ""
        for callback, words in zip(self.callbacks, rows[len(SPREAD) :], strict=True):
            callback.on_words([float(word) for word in words])
        if stopping:
            grace = WARNED_GRACE if warned else GRACE
            self._stop.ask(grace)  # also where another rank was asked: the rest has to end in time on each
        stopped = [rank for rank, flag in enumerate(flags) if flag and stops]
        return StepResult(metrics, stopping > 0, stopped, what)


def diverged(run: TrainingRun, what: str) -> UserError:
    """A sentence of what is not finite, what is saved of the run, and what to try."""
    clip = run.config.optimizer.clip
    now = "--clip 1" if run.job.checked().clips else "--clip 1 with a plan"
    limit = now if clip is None else f"a --clip of less than {clip:g}"
    return UserError(
        f"{what} is not finite, so training has stopped; {saved_in(run.out)}; "
        f"try a --learning-rate of less than {run.config.optimizer.learning_rate:g}, or {limit}"
    )


def _flag(loss: Tensor, state: State) -> int:
    """What is not finite on this rank: nothing (0), the loss (1), or the gradient of layer l (l + 2).

    Where no layer's is, and yet the norm is not, it is that of all layers (the number of layers, and 2).
    """
    if not loss.isfinite().all():
        return 1
    if state.finite or state.settings.precision.scaled:
        return 0
    return 2 + (state.model.layers if state.not_finite is None else state.not_finite)


def _not_finite(flags: Sequence[int], step: int, run: TrainingRun) -> str:
    """The worst of what ranks flag, with all ranks that flag it."""
    found = min(flag for flag in flags if flag)
    ranks = [rank for rank, flag in enumerate(flags) if flag == found]
    what = (
        "loss"
        if found == 1
        else f"gradient of layer {found - 2}"
        if found - 2 < run.job.cut.layers
        else "gradient's norm"
    )
    return f"the {what} of step {step + 1} on rank{'s' * (len(ranks) > 1)} {listed(ranks)}"


# Figures of a step: what each rank saw of it, and the line of metrics.jsonl that follows.


SPREAD = ("dt", "dtf", "dtb", "memory")
"""Figures of which the mean, the least and the most over the ranks are told; docs/training.md defines them."""

READ = 100_000
"""Tokens that are decoded to see how long they are."""


def memory_of(device: torch.device) -> int:
    """The most bytes so far: that torch has taken on a GPU, or that this process has had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def spreads(ranks: Tensor) -> dict[str, float]:
    """Mean, least and most over the ranks of (figures, ranks) in the order of SPREAD."""
    return {
        name + suffix: float(figure)
        for name, row in zip(SPREAD, ranks, strict=True)
        for suffix, figure in (("", row.mean()), ("_min", row.min()), ("_max", row.max()))
    }


def speeds(model: Blocks, sequences: int, dt: float, ranks: int, peak: float | None) -> dict[str, Any]:
    """Sequences and tokens per second, of all ranks and of each, and the model FLOPs utilization.

    A utilization above 1 says that the peak is none, so that it is not known either.

    Args:
        model: what is trained.
        sequences: of the global batch.
        dt: seconds of a step.
        ranks: how many share them.
        peak: FLOP/s of all devices together, if that is known.
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
    """6 N + 12 L H Q T: nanoGPT's formula (`estimate_mfu`), after Chowdhery et al. 2022, arXiv 2204.02311, appendix B.

    N is the number of parameters without position embeddings, and of experts those that a token is sent to; L layers
    have H heads of Q features each, and attend to T tokens.
    """
    top_k, experts = getattr(model, "top_k", 1), getattr(model, "experts", 1)
    routed = sum(
        each.numel
        for layer in range(model.layers)
        for each in model.layout(layer).parameters
        if ".experts." in each.name
    )
    parameters = count_parameters(model).without_positions - routed * (1 - top_k / experts)
    width = model.hidden_size if getattr(model, "heads", 0) else 0
    return 6.0 * parameters + 12.0 * model.layers * width * model.seq_len


def bytes_per_token(corpus: Corpus) -> float:
    """Bytes of text that a predicted token of the training part stands for: a mean over the sources' shares.

    They are counted where the text was encoded; of data that do not tell, some tokens are decoded together.
    """
    stream = corpus.training
    each = [_bytes_per_token(run, corpus.tokenizer) for run in stream.runs]
    return sum(share * ratio for share, ratio in zip(stream.shares, each, strict=True)) / sum(stream.shares)


def _bytes_per_token(run: TokenRun, tokenizer: Tokenizer) -> float:
    if run.sizes is None:
        tokens = np.asarray(run.tokens[:READ])
        return max(1, tokenizer.count_bytes(tokens)) / len(tokens)
    predicted = int(run.sizes.sum()) - first_bytes(run, tokenizer)
    return max(1, predicted) / (len(run.tokens) - run.documents)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token, in bits per byte of text."""
    return loss / math.log(2) / bytes_per_token
