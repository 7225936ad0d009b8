"""The proof on real numbers: a strategy on many ranks against plain training on one device, in float64."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.check import Checked
from shardlab.execute import AdamW, Executor, Settings
from shardlab.execute.communicator import Groups
from shardlab.execute.state import State
from shardlab.models import CutModel, Model
from shardlab.models.tensors import lengthened, to_blocks, to_layers
from shardlab.program import Holds, OpKind
from shardlab.train.data import Batches, Corpus
from shardlab.train.job import Job, agree
from shardlab.train.launch import backend_of, run_ranks
from shardlab.train.reference import train_reference

TOLERANCE = 1e-12
"""Largest error of float64, whose rounding is 1e-16; sums in another order give gradients some 1e-15 of their largest
element apart.

AdamW can make that more: it divides by the gradient's size, so an error d of a gradient g near eps (1e-8) moves the
weight by rate * d * eps / (|g| + eps)^2 in the first step. The small MLP on which `column-parallel` is verified has a
weight whose gradient is 3e-8 of a largest 2.5e-2: there 1.4e-18 becomes 3.5e-13 of the layer's largest weight.
"""

SMALL_NORM = 0.1
"""Norm so small that it clips every gradient, for programs that clip."""


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


def clip_for(checked: Checked, clip: float | None) -> float | None:
    """The norm to which gradients are clipped: as given, or so small that every gradient is, if the program clips."""
    ops = (op for tape in checked.program.tapes for op in tape)
    clips = any(op.kind is OpKind.UPDATE and len(op.inputs) == 4 for op in ops)
    return SMALL_NORM if clip is None and clips else clip


def verify(job: Job, steps: int, clip: float | None = None) -> Verdict | None:
    """Train `steps` steps under the job's strategy on its ranks, and on one device, and compare.

    Args:
        clip: the largest norm of the gradient (None: see `clip_for`).

    Returns:
        The verdict; None in a process of an existing world that is not rank 0.

    Raises:
        Refused: when the program is wrong.
        RankFailed: when a rank raised.
        UserError: for a request that cannot be met.
    """
    job.checked()  # in this process first: a refusal needs no ranks
    return run_ranks(job.ranks, _verdict, job, steps, clip)


def _verdict(rank: int, device: torch.device, job: Job, steps: int, clip: float | None) -> Verdict | None:
    """`verify_rank`, of which only rank 0 tells."""
    verdict = verify_rank(rank, device, job, steps, None, clip)
    return verdict if rank == 0 else None


def verify_rank(
    rank: int, device: torch.device, job: Job, steps: int, groups: Groups | None = None, clip: float | None = None
) -> Verdict | None:
    """Verify one rank's part: it compares every slice that it holds, so that replicas are judged as well."""
    batches = Batches(_random_corpus(job), job.model.seq_len, job.micro_batch_size, job.seed)
    checked = job.checked()
    agree(checked, b"")
    optimizer = AdamW(steps=steps, warmup=1, clip=clip_for(checked, clip))
    settings = Settings(job.seed, job.dtype, device, optimizer)
    seen: dict[tuple[int, Holds], Tensor] = {}

    def observe(layer: int, holds: Holds, gradient: Tensor) -> None:
        seen[layer, holds] = gradient.clone()

    model = job.cut
    executor = Executor(checked, rank, model, batches, settings, backend_of(device), observe, groups)
    trained = _trained(job, checked)
    expected = train_reference(
        job.model, batches, job.microbatches, steps, job.seed, job.dtype, settings.optimizer, trained
    )
    loss_errors: list[float] = []
    gradient_errors: list[tuple[float, int]] = []
    for step in range(steps):
        loss = executor.step().to(device)
        dist.all_reduce(loss)
        mean = float(loss[0] / loss[1])
        loss_errors.append(_number(abs(mean - expected.losses[step]) / abs(expected.losses[step])))
        gradient_errors.append(_worst(executor.state, seen, _as_cut(model, expected.gradients[step])))
    weights = _worst(executor.state, executor.state.kept, _as_cut(model, expected.weights))
    return Verdict(max(loss_errors), *max(gradient_errors), *weights)


def _worst(state: State, slices: Mapping[tuple[int, Holds], Tensor], expected: Sequence[Tensor]) -> tuple[float, int]:
    """The largest error of a layer over all ranks' slices, and the layer."""
    errors = torch.zeros(len(expected), dtype=torch.float64)
    for (layer, holds), ours in slices.items():
        if not ours.numel():
            continue
        whole = lengthened(state.shapes.layouts[layer], expected[layer], state.shapes.flat[layer])
        theirs = torch.cat([whole[start:stop] for start, stop in state.shapes.ranges(layer, holds)])
        error = float((ours.cpu() - theirs).abs().max() / whole.abs().max())
        errors[layer] = max(float(errors[layer]), _number(error))
    errors = errors.to(state.settings.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    layer = int(errors.argmax())
    return float(errors[layer]), layer


def _as_cut(model: Model, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Every layer's flat buffer, from every block's."""
    return to_layers(model, blocks) if isinstance(model, CutModel) else blocks


def _trained(job: Job, checked: Checked) -> Sequence[Tensor]:
    """Every block's flat buffer: 1 where its parameters are trained, and 0 where they are frozen."""
    blocks = [torch.ones(job.model.layout(layer).numel) for layer in range(job.model.layers)]
    model = job.cut
    layers = _as_cut(model, blocks)
    for layer in checked.frozen:
        layers[layer].zero_()
    return to_blocks(model, layers) if isinstance(model, CutModel) else layers


def _number(error: float) -> float:
    """An error that is not a number is the largest of all."""
    return math.inf if math.isnan(error) else error


def _random_corpus(job: Job) -> Corpus:
    """Text of random bytes within the model's vocabulary."""
    generator = torch.Generator().manual_seed(job.seed)
    length = max(4096, 8 * (job.model.seq_len + 1))
    text = torch.randint(min(256, job.model.vocab_size), (length,), generator=generator, dtype=torch.uint8)
    return Corpus.split(text.numpy().tobytes(), job.model.seq_len)
