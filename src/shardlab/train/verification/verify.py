"""Comparison of a strategy on many ranks with plain training on one device.

`verify_rank` runs on each rank: it trains a few steps, and compares every slice that the rank holds with the reference.
`verify_all` runs many cases on ranks that are started once for each number of ranks.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

import torch
import torch.distributed as dist
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text
from torch import Tensor

from shardlab.check import Checked
from shardlab.common.user_code import in_notebook_cell
from shardlab.execute.collect import averaged_weights
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings, torch_dtype
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

EPS = 0.1
"""eps of AdamW on both sides, larger than almost all gradients of small models.

AdamW divides a gradient g by |g| + eps in its first step. With the usual eps of 1e-8, a weight moves by the sign of its
gradient. If the gradient is nearly zero, rounding decides that sign, and the next steps start from other weights. With
a large eps, the update is a smooth function of the gradient: an error d of a gradient moves the weight by at most
rate * d / eps. An error of the gradient's scale, which the usual eps would divide out, reaches the weights as well.
"""

SAFE_SCALE = 2.0**8
"""Loss scale for float16, with which gradients of the small models do not overflow, so that no step is skipped."""


def verdict_on_rank(
    rank: int, device: torch.device, job: Job, steps: int, clip: float | None, compile: bool
) -> Verdict | None:
    """Call `verify_rank`, and return the verdict on rank 0 and None on the others."""
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
    """Train on one rank, and compare every slice that it holds with one device. All replicas are thus compared.

    Args:
        rank, device: number of the rank, and the device on which it computes.
        job: strategy and model.
        steps: number of steps.
        groups: process groups that are shared with other cases.
        clip: largest norm of the gradient (None: see `clip_for`).
        compile: compile the layers.
        trained: function that is called with the state of this rank after the last step.

    Returns:
        The verdict, equal on all ranks.
    """
    batches = Batches(_random_corpus(job), job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    checked = job.checked()
    require_agreement(checked, "")
    limit = clip_for(checked, clip)
    optimizer = OptimizerConfig(job.optimizer, schedule_steps=steps, warmup_steps=1, clip=limit, eps=EPS, ema=job.ema)
    settings = Settings(job.seed, job.numbers, device, optimizer, loss_scale=SAFE_SCALE, compile=compile)
    latest: dict[tuple[int, Holds], Tensor] = {}  # gradients of the last step

    def observe(layer: int, holds: Holds, gradient: Tensor) -> None:
        latest[layer, holds] = gradient.clone()

    model = job.cut
    executor = Executor(checked, rank, model, batches, settings, backend_of(device.type), observe, groups)

    def one_device(numbers: Precision) -> Reference:
        """Train the reference on rank 0 alone, so that the cores of the other ranks are free. Every rank calls this.

        Float64 is computed on the CPU, lower precision on a device of the ranks' type. If the scores of a router are
        nearly equal, the rounding of other kernels would choose another expert, which is no fault of the strategy.
        """
        arguments = job.model, batches, [job.microbatches] * steps, job.seed, numbers, settings.optimizer
        reference_device = CPU if numbers is FP64 else device
        results = [train_reference(*arguments, _trained_mask(job, checked), reference_device) if rank == 0 else None]
        dist.broadcast_object_list(results, device=device)
        assert results[0] is not None
        return results[0]

    reference = one_device(job.numbers)
    losses: list[float] = []
    gradients: list[Slices] = []
    for _ in range(steps):
        loss = executor.step().to(device)
        dist.all_reduce(loss)
        losses.append(float(loss[0] / loss[1]))
        gradients.append(dict(latest))
    state = executor.state
    if trained is not None:
        trained(state)
    stored: list[Slices] = [state.kept]
    if job.ema is not None:
        with averaged_weights(state):
            stored.append({key: weight.clone() for key, weight in state.kept.items()})

    def errors(expected: Reference, other: Reference | None = None) -> Errors:
        """Compare this rank's slices, or the same slices of another reference, with the expected ones."""
        pairs = zip(other.losses if other else losses, expected.losses, strict=True)
        loss_errors = [abs(a - b) / abs(b) for a, b in pairs]
        slices = [*gradients, *stored]
        if other is not None:
            slices = [
                {key: _slice(state, whole, *key) for key in own_slices}
                for own_slices, whole in zip(slices, (_as_cut(model, tensors) for tensors in other.all), strict=True)
            ]
        worst = _worst_element if expected is reference else _worst_vector
        tensor_errors = [worst(state, a, _as_cut(model, b)) for a, b in zip(slices, expected.all, strict=True)]
        return Errors(max(map(_nan_as_inf, loss_errors)), *max(tensor_errors[:steps]), *max(tensor_errors[steps:]))

    if job.numbers is FP64:
        return Verdict(**asdict(errors(reference)))
    exact = one_device(FP64)
    rounding, alone = torch.finfo(torch_dtype(job.numbers.compute)).eps, errors(exact, reference)
    return Verdict(**asdict(errors(reference)), exact=errors(exact), one_device=alone, rounding=rounding)


Slices = Mapping[tuple[int, Holds], Tensor]
"""Tensors by number of the layer and slices that the tensor holds."""


@dataclass(frozen=True)
class CaseResult:
    """Result of a case.

    Attributes:
        case: the case.
        error: largest error of loss, gradients and weights; infinity if the case did not run.
        refused: reason why the case did not run; empty if it ran.
    """

    case: Case
    error: float
    refused: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE

    def __str__(self) -> str:
        outcome = self.refused or f"{self.error:.1e}" + ("" if self.ok else f", more than {TOLERANCE:.0e}")
        return f"{self.case}: {outcome}"


def verify_all(cases: Sequence[Case], steps: int, results: list[CaseResult]) -> None:
    """Verify all cases, and show the progress on stderr. Ranks are started once for each number of ranks.

    Args:
        results: list to which the result of each case is added when the case ends. If the cases are interrupted, it has
            the results of those before.

    Raises:
        RankFailed: if a rank fails.
        KeyboardInterrupt: if this process or a rank was asked to end.
    """
    for ranks in sorted({case.ranks for case in cases}):
        group = [case for case in cases if case.ranks == ranks]
        receiver, sender = Pipe(duplex=False)
        with CaseProgress(group) as progress, receiver:

            def collect(results_of_ranks: Connection = receiver, progress: CaseProgress = progress) -> None:
                with suppress(EOFError, OSError):  # a rank may be killed while it sends
                    while True:
                        results.append(results_of_ranks.recv())
                        progress.show(results[-1])

            collector = Thread(target=collect)
            collector.start()
            try:
                with sender:
                    run_ranks(ranks, verify_cases, group, steps, sender.send)
            finally:
                collector.join()


def verify_cases(
    rank: int, device: torch.device, cases: Sequence[Case], steps: int, send: Callable[[CaseResult], object]
) -> None:
    """Run this rank's part of cases whose number of ranks is the size of this world. Rank 0 sends each result."""
    groups: Groups = {}
    for case in cases:
        try:
            verdict = verify_rank(rank, device, case.job(), steps, groups)
            result = CaseResult(case, max(verdict.all))
        except (Refused, UserError) as error:  # all ranks trace the same program, so all of them raise or none
            result = CaseResult(case, math.inf, str(error))
        if rank == 0:
            send(result)


class CaseProgress(Progress):
    """Progress of many cases.

    In a terminal, it is a live bar, above which wrong cases are printed. In a pipe, it is a line for each case.
    """

    def __init__(self, cases: Sequence[Case]) -> None:
        console = Console(file=sys.stderr, highlight=False)
        super().__init__(
            TextColumn(f"{cases[0].ranks} ranks"),
            BarColumn(20),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal or in_notebook_cell(),
        )
        self._task = self.add_task("starting", total=len(cases))

    def show(self, result: CaseResult) -> None:
        """Show the result of a case that has ended."""
        line = f"{result.case.ranks} ranks  {'' if result.ok else 'WRONG  '}{result}"
        self.update(self._task, advance=1, description=escape(str(result)))
        if self.disable:
            print(line, file=sys.stderr, flush=True)
        elif not result.ok:
            self.console.print(Text(line, "red"))


def _slice(state: State, layers: Sequence[Tensor], layer: int, holds: Holds) -> Tensor:
    """Return the slices `holds` of a layer's flat buffer as one tensor."""
    whole = pad_runs(state.shapes.layouts[layer], layers[layer], state.shapes.flat[layer])
    return torch.cat([whole[start:stop] for start, stop in state.shapes.ranges(layer, holds)])


def _worst_element(state: State, slices: Slices, expected: Sequence[Tensor]) -> tuple[float, int]:
    """Return the largest error max|a - b| / max|b| of a layer over all ranks' slices, and the layer."""
    errors = torch.zeros(len(expected), dtype=torch.float64)
    for (layer, holds), own_slice in slices.items():
        if not own_slice.numel():
            continue
        expected_slice = _slice(state, expected, layer, holds).double()
        error = float((own_slice.cpu().double() - expected_slice).abs().max() / expected[layer].abs().max())
        errors[layer] = max(float(errors[layer]), _nan_as_inf(error))
    errors = errors.to(state.settings.device)
    dist.all_reduce(errors, dist.ReduceOp.MAX)
    layer = int(errors.argmax())
    return float(errors[layer]), layer


def _worst_vector(state: State, slices: Slices, expected: Sequence[Tensor]) -> tuple[float, int]:
    """Return the largest error |a - b| / |b| of a layer, as lengths of vectors over all ranks' slices, and the layer.

    In lower precision, the rounding of a single element would say little about the strategy.
    """
    squares = torch.zeros(2, len(expected), dtype=torch.float64)
    for (layer, holds), own_slice in slices.items():
        expected_slice = _slice(state, expected, layer, holds).double()
        squares[0, layer] += (own_slice.cpu().double() - expected_slice).square().sum()
        squares[1, layer] += expected_slice.square().sum()
    squares = squares.to(state.settings.device)
    dist.all_reduce(squares)
    errors = (squares[0] / squares[1].clamp_min(1e-300)).sqrt().nan_to_num(math.inf)
    layer = int(errors.argmax())
    return float(errors[layer]), layer


def _as_cut(model: Model, blocks: Sequence[Tensor]) -> Sequence[Tensor]:
    """Convert the flat buffers of all blocks to those of the layers of the program."""
    return to_layers(model, blocks) if isinstance(model, CutModel) else blocks


def _trained_mask(job: Job, checked: Checked) -> Sequence[Tensor]:
    """Return the mask of each block, in the shape of its flat buffer: 1 for trained parameters, 0 for frozen ones."""
    blocks = [torch.ones(job.model.layout(layer).numel) for layer in range(job.model.layers)]
    model = job.cut
    layers = _as_cut(model, blocks)
    for layer in checked.frozen:
        layers[layer].zero_()
    return to_blocks(model, layers) if isinstance(model, CutModel) else layers


def _nan_as_inf(error: float) -> float:
    """Return infinity for NaN, so that it is the largest error."""
    return math.inf if math.isnan(error) else error


def _random_corpus(job: Job) -> Corpus:
    """Return a corpus of random bytes within the model's vocabulary."""
    generator = torch.Generator().manual_seed(job.seed)
    length = max(4096, 8 * (job.model.seq_len + 1))
    text = torch.randint(min(256, job.model.vocab_size), (length,), generator=generator, dtype=torch.uint8)
    return Corpus.from_text(text.numpy().tobytes(), job.model.seq_len)
