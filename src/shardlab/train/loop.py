"""Training: one rank's loop, and what rank 0 makes of the result."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute import AdamW, Executor, Settings
from shardlab.execute.collect import collect
from shardlab.models import CutModel, Model
from shardlab.models.tensors import generate, initial_weights, layers_of, loss_of, to_blocks, views, with_borrowed
from shardlab.rules.pieces import counted
from shardlab.train.data import Batches, Corpus, default_text, read_text
from shardlab.train.interrupt import StopRequest
from shardlab.train.job import Job, agree
from shardlab.train.launch import backend_of
from shardlab.train.output import OutputFolder
from shardlab.train.progress import TrainingProgress
from shardlab.train.saved import saved_in
from shardlab.train.tracing import Tracer, Tracing

VALIDATION_BATCHES = 16
SAMPLE_BYTES = 200


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        job: what is trained.
        optimizer: AdamW's settings, with the number of steps.
        data: the text; None for the source of Python's standard library.
        out: the output folder, not there yet.
        tracing: how much of it is recorded (None: nothing).
    """

    job: Job
    optimizer: AdamW
    data: Path | None
    out: Path
    tracing: Tracing | None = None

    def text(self) -> bytes:
        """The text, as bytes.

        Raises:
            UserError: when it cannot be read.
        """
        return default_text() if self.data is None else read_text(self.data)

    def corpus(self, text: bytes) -> Corpus:
        """The text in two parts.

        Raises:
            UserError: when it is shorter than two sequences.
        """
        source = "the default text" if self.data is None else str(self.data)
        return Corpus.split(text, self.job.model.block, source)


@dataclass(frozen=True)
class Summary:
    """What a run came to.

    Attributes:
        steps: optimizer steps taken, fewer than asked for if the run was interrupted.
        interrupted: whether it was.
        validation_before, validation_after: loss on text that is not trained on, nats per token.
        tokens_per_second, ms_per_step: medians over the steps.
        sample: text that the trained model continues.
        out: the output folder.
    """

    steps: int
    interrupted: bool
    validation_before: float
    validation_after: float
    tokens_per_second: float
    ms_per_step: float
    sample: str
    out: str


def train_rank(rank: int, device: torch.device, run: Run) -> Summary | None:
    """One rank's part of a run; rank 0 writes the output folder and gives the summary."""
    with StopRequest(partial(saved_in, run.out) if rank == 0 else None) as stop:
        return _train(rank, device, run, stop)


def _train(rank: int, device: torch.device, run: Run, stop: StopRequest) -> Summary | None:
    job, text = run.job, run.text()
    batches = Batches(run.corpus(text), job.model.block, job.rows, job.seed)
    checked = job.checked()
    agree(checked, text)
    settings = Settings(job.seed, job.dtype, device, run.optimizer)
    model = job.cut
    executor = Executor(checked, rank, model, batches, settings, backend_of(device))
    tracer = Tracer(executor, job, run.out, run.tracing) if run.tracing else None
    folder = progress = None
    before = 0.0
    if rank == 0:
        folder = OutputFolder(run.out)
        folder.write_strategy(checked, job.title)
        first = [initial_weights(job.model, layer, job.seed, job.dtype) for layer in range(job.model.layers)]
        before = validate(job.model, batches, first)
        print(
            f"{job.title} on {counted(job.ranks, 'rank')}: {sum(map(len, checked.program.tapes))} ops checked, "
            f"drawn in {run.out}/strategy.svg",
            file=sys.stderr,
        )
        progress = TrainingProgress(run.optimizer.steps)

    times: list[float] = []
    for metrics in _steps(tracer or executor, run, stop, device):
        times.append(metrics["ms"])
        if folder is not None and progress is not None:
            folder.write_metrics(metrics)
            progress.show(metrics)

    if tracer is not None:
        tracer.finish()
    flats = collect(executor.state, executor.state.kept)
    if folder is None or progress is None or flats is None:
        return None
    if isinstance(model, CutModel):
        flats = to_blocks(model, flats)
    progress.stop()
    folder.write_weights(job.model, flats)  # first, since a run that is interrupted has little time
    after = validate(job.model, batches, flats)
    folder.write_plot(before, after)
    folder.close()
    ms = sorted(times)[len(times) // 2]
    prompt = torch.tensor(list(b"def "))
    sample = (
        generate(job.model, flats, prompt, SAMPLE_BYTES, job.seed)
        .clamp(max=255)  # a larger vocabulary has tokens that are no byte; 255 alone is no text
        .to(torch.uint8)
        .numpy()
        .tobytes()
        .decode(errors="replace")
    )
    interrupted = len(times) < run.optimizer.steps
    return Summary(len(times), interrupted, before, after, job.tokens / ms * 1000, ms, sample, str(run.out))


def _steps(executor: Executor | Tracer, run: Run, stop: StopRequest, device: torch.device) -> Any:
    """Train, giving each step's figures. Loss and the wish to stop are summed over ranks while the next step runs."""
    summing: tuple[int, float, Tensor, dist.Work] | None = None
    for step in range(run.optimizer.steps):
        start = time.perf_counter()
        loss = executor.step()
        ms = 1000 * (time.perf_counter() - start)
        sums = torch.cat([loss, torch.tensor([float(stop.asked)], dtype=loss.dtype)]).to(device)
        work = cast(dist.Work, dist.all_reduce(sums, async_op=True))
        before, summing = summing, (step, ms, sums, work)
        if before is not None:
            metrics, stopping = _figures(run, *before)
            yield metrics
            if stopping:
                stop.ask()
                break
    if summing is not None:
        yield _figures(run, *summing)[0]


def _figures(run: Run, step: int, ms: float, sums: Tensor, work: dist.Work) -> tuple[dict[str, Any], bool]:
    work.wait()
    total, tokens, stopping = (float(figure) for figure in sums)
    metrics = {
        "step": step,
        "loss": total / tokens,
        "ms": round(ms, 3),
        "tokens_per_second": round(run.job.tokens / ms * 1000, 1),
        "learning_rate": run.optimizer.rate(step),
    }
    return metrics, stopping > 0


@torch.no_grad()
def validate(model: Model, batches: Batches, flats: Sequence[Tensor]) -> float:
    """Mean loss on the first microbatches of the validation text, in nats per token, without dropout."""
    layers = layers_of(model)
    parameters = with_borrowed(model, [views(model.layout(layer), flat) for layer, flat in enumerate(flats)])
    total, tokens = 0.0, 0
    for index in range(min(VALIDATION_BATCHES, batches.validation_count)):
        x, targets = batches.validation(index)
        for layer, weights in zip(layers, parameters, strict=True):
            x = layer(weights, x)
        total += float(loss_of(x, targets))
        tokens += targets.numel()
    return total / tokens
