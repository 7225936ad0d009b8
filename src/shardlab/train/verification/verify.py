"""The proof on real numbers: a strategy on many ranks against plain training on one device, in float64."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from shardlab.check import Checked
from shardlab.execute import Executor, OptimizerConfig, Settings
from shardlab.execute.collect import averaged_weights
from shardlab.execute.settings import torch_dtype
from shardlab.execute.state import State
from shardlab.execute.transport.collectives import Groups
from shardlab.language import Holds, Refused, UserError
from shardlab.language.precision import FP64, Precision
from shardlab.models import CutModel, Model
from shardlab.models.tensors import pad_runs, to_blocks, to_layers
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of, run_ranks
from shardlab.train.verification.cases import TOLERANCE, Case, Errors, Verdict, clip_for
from shardlab.train.verification.reference import CPU, Reference, train_reference
from shardlab.train.world import require_agreement

SMALL_EPS, LARGE_EPS = 1e-8, 0.1
"""AdamW's usual eps; in lower precision one so large that a weight is moved by its gradient. With the usual one it is
moved by the gradient's sign, which is that of its rounding where the gradient is nearly zero.
"""

SAFE_SCALE = 2.0**8
"""Loss scale of verification in float16: gradients of its small models do not overflow, so that no step is left out."""


def verdict_on_rank(
    rank: int, device: torch.device, job: Job, steps: int, clip: float | None, compile: bool
) -> Verdict | None:
    """Verify one rank's part, and return the verdict on rank 0 alone."""
    verdict = verify_rank(rank, device, job, steps, None, clip, compile)
    return verdict if rank == 0 else None


def verify_rank(
    rank: int,
    device: torch.device,
    job: Job,
    steps: int,
    groups: Groups | None = None,
    clip: float | None = None,
    compile: bool = False,
    trained: Callable[[State], object] | None = None,
) -> Verdict:
    """Verify one rank's part: it compares every slice that it holds, so that replicas are judged as well.

    Args:
        trained: called with what this rank has after the last step.
    """
    batches = Batches(_random_corpus(job), job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    checked = job.checked()
    require_agreement(checked, "")
    eps = SMALL_EPS if job.numbers is FP64 else LARGE_EPS
    limit = clip_for(checked, clip)
    optimizer = OptimizerConfig(job.optimizer, schedule_steps=steps, warmup_steps=1, clip=limit, eps=eps, ema=job.ema)
    settings = Settings(job.seed, job.numbers, device, optimizer, loss_scale=SAFE_SCALE, compile=compile)
    seen: dict[tuple[int, Holds], Tensor] = {}

    def observe(layer: int, holds: Holds, gradient: Tensor) -> None:
        seen[layer, holds] = gradient.clone()

    model = job.cut
    executor = Executor(checked, rank, model, batches, settings, backend_of(device.type), observe, groups)

    def one_device(numbers: Precision) -> Reference:
        """Train on rank 0 alone, so that the others' cores are free; every rank calls this.

        Float64 is computed on the CPU. Lower precision is computed on a device like the ranks': where a router's scores
        are nearly equal, the rounding of other kernels chooses another expert, and that says nothing of the strategy.
        """
        task = job.model, batches, [job.microbatches] * steps, job.seed, numbers, settings.optimizer
        where = CPU if numbers is FP64 else device
        found = [train_reference(*task, _unfrozen(job, checked), where) if rank == 0 else None]
        dist.broadcast_object_list(found, device=device)
        assert found[0] is not None
        return found[0]

    alone = one_device(job.numbers)
    losses: list[float] = []
    gradients: list[Slices] = []
    for _ in range(steps):
        loss = executor.step().to(device)
        dist.all_reduce(loss)
        losses.append(float(loss[0] / loss[1]))
        gradients.append(dict(seen))
    state = executor.state
    if trained is not None:
        trained(state)
    kept: list[Slices] = [state.kept]
    if job.ema is not None:
        with averaged_weights(state):
            kept.append({key: weight.clone() for key, weight in state.kept.items()})

    def errors(expected: Reference, its: Reference | None = None) -> Errors:
        """Of what this rank has, or of what one device has of the same slices."""
        found = [abs(a - b) / abs(b) for a, b in zip(its.losses if its else losses, expected.losses, strict=True)]
        given = [*gradients, *kept]
        if its is not None:
            given = [
                {key: _slice(state, whole, *key) for key in mine}
                for mine, whole in zip(given, (_as_cut(model, each) for each in its.all), strict=True)
            ]
        worst = _worst if expected is alone else _worst_in_all
        found_of = [worst(state, a, _as_cut(model, b)) for a, b in zip(given, expected.all, strict=True)]
        return Errors(max(map(_number, found)), *max(found_of[:steps]), *max(found_of[steps:]))

    if job.numbers is FP64:
        return Verdict(**asdict(errors(alone)))
    exact = one_device(FP64)
    rounding = torch.finfo(torch_dtype(job.numbers.compute)).eps
    return Verdict(**asdict(errors(alone)), exact=errors(exact), one_device=errors(exact, alone), rounding=rounding)


Slices = Mapping[tuple[int, Holds], Tensor]
"""Tensors of slices, by layer and slices."""


def _slice(state: State, layers: Sequence[Tensor], layer: int, holds: Holds) -> Tensor:
    """Some slices of a layer's flat buffer."""
    whole = pad_runs(state.shapes.layouts[layer], layers[layer], state.shapes.flat[layer])
    return torch.cat([whole[start:stop] for start, stop in state.shapes.ranges(layer, holds)])


def _worst(state: State, slices: Slices, expected: Sequence[Tensor]) -> tuple[float, int]:
    """The largest error of a layer over all ranks' slices, and the layer."""
    errors = torch.zeros(len(expected), dtype=torch.float64)
    for (layer, holds), ours in slices.items():
        if not ours.numel():
            continue
        theirs = _slice(state, expected, layer, holds).double()
        error = float((ours.cpu().double() - theirs).abs().max() / expected[layer].abs().max())
        errors[layer] = max(float(errors[layer]), _number(error))
    errors = errors.to(state.settings.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    layer = int(errors.argmax())
    return float(errors[layer]), layer


def _worst_in_all(state: State, slices: Slices, expected: Sequence[Tensor]) -> tuple[float, int]:
    """The largest |a - b| / |b| of a layer, as lengths of vectors of all ranks' slices, and the layer.

    A single element's rounding says little of how exact a strategy is.
    """
    squares = torch.zeros(2, len(expected), dtype=torch.float64)
    for (layer, holds), ours in slices.items():
        theirs = _slice(state, expected, layer, holds).double()
        squares[0, layer] += (ours.cpu().double() - theirs).square().sum()
        squares[1, layer] += theirs.square().sum()
    squares = squares.to(state.settings.device)
    dist.all_reduce(squares)
    errors = (squares[0] / squares[1].clamp_min(1e-300)).sqrt().nan_to_num(math.inf)
    layer = int(errors.argmax())
    return float(errors[layer]), layer


def _as_cut(model: Model, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Every layer's flat buffer, from every block's."""
    return to_layers(model, blocks) if isinstance(model, CutModel) else blocks


def _unfrozen(job: Job, checked: Checked) -> Sequence[Tensor]:
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
    return Corpus.from_text(text.numpy().tobytes(), job.model.seq_len)


# Many strategies verified one after the other, on processes that are started once for each number of ranks.


@dataclass(frozen=True)
class CaseResult:
    """Result of a case.

    Attributes:
        case: what was verified.
        error: the largest error of loss, gradients and weights; infinite if it did not run.
        refused: why it did not run, if it did not.
    """

    case: Case
    error: float
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE


def verify_all(cases: Sequence[Case], steps: int) -> list[CaseResult]:
    """Verify all cases, on each number of ranks those that need as many; progress is shown on stderr.

    Raises:
        RankFailed: when a rank raised.
    """
    found: dict[Case, CaseResult] = {}
    for ranks in sorted({case.ranks for case in cases}):
        here = [case for case in cases if case.ranks == ranks]
        found |= {result.case: result for result in run_ranks(ranks, verify_cases, here, steps)}
    return [found[case] for case in cases]


def verify_cases(rank: int, device: torch.device, cases: Sequence[Case], steps: int) -> list[CaseResult]:
    """Verify one rank's part of all cases, each on as many ranks as there are; rank 0 shows the progress."""
    results: list[CaseResult] = []
    groups: Groups = {}
    with CaseProgress(cases, shown=rank == 0) as progress:
        for case in cases:
            try:
                verdict = verify_rank(rank, device, case.job(), steps, groups)
                worst = max(verdict.loss_error, verdict.gradient_error, verdict.weight_error)
                result = CaseResult(case, worst)
            except (Refused, UserError) as error:  # every rank traces the same, so all come here or none
                result = CaseResult(case, math.inf, str(error))
            results.append(result)
            progress.show(result)
    return results


class CaseProgress(Progress):
    """A live bar in a terminal, and in a pipe a line for each case."""

    def __init__(self, cases: Sequence[Case], *, shown: bool) -> None:
        console = Console(file=sys.stderr, highlight=False)
        self._printed = shown and not console.is_terminal
        super().__init__(
            TextColumn(f"{cases[0].ranks} ranks" if cases else ""),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not shown or self._printed,
        )
        self._task = self.add_task("starting", total=len(cases))

    def show(self, result: CaseResult) -> None:
        """A case has ended."""
        text = f"{result.case}: {result.refused or format(result.error, '.1e')}"
        self.update(self._task, advance=1, description=text)
        if self._printed:
            print(f"{result.case.ranks} ranks  {text}", file=sys.stderr, flush=True)
