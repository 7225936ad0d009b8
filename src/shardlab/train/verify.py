"""The proof on real numbers: a strategy on many ranks against plain training on one device, in float64."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.execute import AdamW, Executor, Settings
from shardlab.execute.collect import collect
from shardlab.program import Holds
from shardlab.train.data import Batches, Corpus
from shardlab.train.job import Job, agree
from shardlab.train.launch import backend_of, run_ranks
from shardlab.train.reference import train_reference

TOLERANCE = 1e-12


@dataclass(frozen=True)
class Verdict:
    """How far a strategy's numbers are from one device's.

    Attributes:
        loss_error: largest relative difference of a step's loss.
        gradient_error, weight_error: of the worst layer (and step), max|a - b| / max|b| over all its parameters
            together; elementwise, a gradient of zero (an attention's key bias has one) would make it meaningless.
        gradient_layer, weight_layer: the worst layers.
    """

    loss_error: float
    gradient_error: float
    gradient_layer: int
    weight_error: float
    weight_layer: int

    @property
    def ok(self) -> bool:
        """Whether every error is within 1e-12."""
        return max(self.loss_error, self.gradient_error, self.weight_error) <= TOLERANCE


def verify(job: Job, steps: int) -> Verdict | None:
    """Train `steps` steps under the job's strategy on its ranks, and on one device, and compare.

    Returns:
        The verdict; None in a process of an existing world that is not rank 0.

    Raises:
        Refused: when the program is wrong.
        RankFailed: when a rank raised.
        UserError: for a request that cannot be met.
    """
    job.checked()  # in this process first: a refusal needs no ranks
    return run_ranks(job.ranks, verify_rank, job, steps)


def verify_rank(rank: int, device: torch.device, job: Job, steps: int) -> Verdict | None:
    """One rank's part; rank 0 compares."""
    batches = Batches(_random_corpus(job), job.model.block, job.rows, job.seed)
    checked = job.checked()
    agree(checked, b"")
    settings = Settings(job.seed, job.dtype, device, AdamW(steps=steps, warmup=1))
    seen: dict[tuple[int, Holds], Tensor] = {}

    def observe(layer: int, holds: Holds, gradient: Tensor) -> None:
        seen[layer, holds] = gradient.clone()

    executor = Executor(checked, rank, job.model, batches, settings, backend_of(device), observe)
    losses: list[float] = []
    gradients: list[list[Tensor] | None] = []
    for _ in range(steps):
        loss = executor.step().to(device)
        dist.all_reduce(loss)
        losses.append(float(loss[0] / loss[1]))
        gradients.append(collect(executor.state, seen))
    kept = {key: part.flat for key, part in executor.state.slices.items()}
    weights = collect(executor.state, kept)
    if weights is None:
        return None
    reference = train_reference(job.model, batches, job.microbatches, steps, job.seed, job.dtype, settings.optimizer)
    by_step = [_worst(ours or [], theirs) for ours, theirs in zip(gradients, reference.gradients, strict=True)]
    loss_errors = [abs(ours - theirs) / abs(theirs) for ours, theirs in zip(losses, reference.losses, strict=True)]
    return Verdict(max(loss_errors), *max(by_step), *_worst(weights, reference.weights))


def _random_corpus(job: Job) -> Corpus:
    """Text of random bytes within the model's vocabulary."""
    generator = torch.Generator().manual_seed(job.seed)
    length = max(4096, 8 * (job.model.block + 1))
    text = torch.randint(min(256, job.model.vocabulary), (length,), generator=generator, dtype=torch.uint8)
    return Corpus.split(text.numpy().tobytes(), job.model.block)


def _worst(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, int]:
    """The largest error of a layer, and the layer; a result that is not a number is the largest of all."""
    errors: list[tuple[float, int]] = []
    for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        error = float((a[: len(b)] - b).abs().max() / b.abs().max())
        errors.append((error if error == error else float("inf"), layer))
    return max(errors)
