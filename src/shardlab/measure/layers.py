"""Timing of the ops of a real training step, as the executor runs them."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.kernel_choice import choose_products
from shardlab.execute.settings import Settings
from shardlab.language import Op, OpKind
from shardlab.language.precision import precision_for_dtype
from shardlab.measure.collectives import Clock, MeasuringRanks, iterations_for
from shardlab.measure.fits import MEASURED, MICROBATCHES, LayerPoint, PeakPoint, Shape, Subject, append, subjects
from shardlab.measure.progress import Progress
from shardlab.models.tensors.compute import AVAILABLE, kernel_choices, onednn_linear
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.launch.environment import CpuShare, threads_of

PEAK_SIZES = {"cpu": (512, 1024, 2048), "cuda": (4096, 8192, 16384)}
"""Sizes of square matrices. The FLOP/s of their fastest product are the peak."""


OpKey = tuple[OpKind, int]
"""Kind of an op, and its layer; the layer of an optimizer step is -1."""

ALL_UPDATES: OpKey = (OpKind.UPDATE, -1)


@dataclass(frozen=True)
class ComputeBench:
    """Plan of a measurement of layers: models of every shape, in every data type.

    Attributes:
        shapes: widths and microbatches.
        dtypes: torch's names of the data types.
        vocab_size: size of the head's vocabulary.
        seconds: approximate time for which each step is repeated.
    """

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = ("float32",)
    vocab_size: int = 256
    seconds: float = 2.0

    def plan(self, ranks: int) -> list[tuple[int, str, Shape | None]]:
        """Return (processes, dtype, shape) of every measurement. The peak, which has no shape, comes first.

        Everything is measured with one process, and then with all at the same time, since they share the memory.
        """
        processes = sorted({1, ranks})
        shapes = (None, *self.shapes)
        return [(count, dtype, shape) for count in processes for dtype in self.dtypes for shape in shapes]


def measure_compute(rank: int, device: torch.device, bench: ComputeBench, file: Path) -> bool:
    """Run one rank's part of the measurement; rank 0 writes every point into the file at once.

    Returns:
        Whether this is rank 0.
    """
    world = MeasuringRanks(rank, device)
    plan = bench.plan(world.size)
    threads = torch.get_num_threads()
    alone = max(threads, threads_of([CpuShare.of_this_process()]))  # as a run on one rank does
    progress = Progress(len(plan), show=rank == 0)
    for processes, dtype, shape in plan:
        shape_text = "large products" if shape is None else f"width {shape.width}, {shape.rows} x {shape.tokens} tokens"
        progress.say(f"{shape_text}, {dtype}, {processes} at once")
        world.meet()
        crowd = Crowd(world, processes)
        torch.set_num_threads(alone if processes == 1 else threads)
        if rank < processes:
            for point in [_peak(crowd, dtype, bench.seconds)] if shape is None else _layers(crowd, bench, shape, dtype):
                if rank == 0:
                    append(file, point)
        world.meet()
        progress.step()
    progress.stop()
    return rank == 0


@dataclass(frozen=True)
class Crowd:
    """Processes that compute at the same time: all processes of the world, or one while the others wait."""

    world: MeasuringRanks
    processes: int

    def meet(self) -> None:
        if self.processes > 1:
            self.world.meet()

    def mean(self, number: float) -> float:
        return self.world.mean(number) if self.processes > 1 else number


@dataclass(frozen=True)
class KnownTokens(Batches):
    """Microbatches of a text, with tokens taken modulo the size of a small vocabulary."""

    vocab_size: int = 256

    def microbatch(self, step: int, microbatch: int) -> tuple[Tensor, Tensor]:
        x, targets = super().microbatch(step, microbatch)
        return x.remainder_(self.vocab_size), targets.remainder_(self.vocab_size)


def _peak(crowd: Crowd, dtype: str, budget: float) -> PeakPoint:
    """Measure the fastest product. If a product takes longer than `budget` seconds, larger ones are not measured."""
    device = crowd.world.device
    clock = Clock(device)
    best, seconds = (0.0, 0), 0.0
    for size in PEAK_SIZES[device.type]:
        a = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)  # a GPU multiplies ones faster
        products: list[Callable[[], Tensor]] = [partial(torch.mm, a, a, out=torch.empty_like(a))]
        if AVAILABLE and device.type == "cpu" and dtype == "float32":
            products.append(partial(onednn_linear, a, a))
        for product in products:
            product()
            crowd.meet()
            seconds = crowd.mean(min(clock.seconds(product, 1) for _ in range(5)))
            best = max(best, (2.0 * size**3 / seconds, size))
        if seconds > budget:
            break
    return PeakPoint(dtype, crowd.processes, best[1], best[0], torch.get_num_threads())


def _layers(crowd: Crowd, bench: ComputeBench, shape: Shape, dtype: str) -> Iterator[LayerPoint]:
    for subject in subjects(shape, dtype, bench.vocab_size):
        with kernel_choices({}):
            yield from _measure(crowd, subject, bench.seconds)
    yield _addition(crowd, shape, dtype)


def _addition(crowd: Crowd, shape: Shape, dtype: str) -> LayerPoint:
    """Measure an ADD of a tape: the in-place addition of two gradients of the size of a block's gradient."""
    clock, elements = Clock(crowd.world.device), 12 * shape.width**2
    a, b = torch.zeros(2, elements, dtype=getattr(torch, dtype), device=crowd.world.device)
    crowd.meet()
    times = [clock.seconds(lambda: a.add_(b), 5) for _ in range(7)]
    work = (("pointwise:add", 0.0, 3.0 * elements * a.element_size()),)
    seconds, fastest = crowd.mean(median(times)), crowd.mean(min(times))
    measured = (shape.width, shape.rows, shape.tokens, elements, dtype, crowd.processes, seconds, fastest)
    return LayerPoint("gradient", "add", *measured, work)


def _measure(crowd: Crowd, subject: Subject, budget: float) -> Iterator[LayerPoint]:
    """Run steps with a mark of the clock between any two ops, and yield a point for each kind of op and layer."""
    model, device, clock = subject.model, crowd.world.device, Clock(crowd.world.device)
    text, length = Corpus.open((), model.seq_len), model.seq_len
    batches = KnownTokens(text, length, subject.rows, MICROBATCHES, seed=0, vocab_size=model.vocab_size)
    settings = Settings(precision=precision_for_dtype(subject.dtype), device=device)
    executor = Executor(subject.checked(), 0, model, batches, settings)
    executor.instructions = [clock.mark, *(_with_mark(run, clock) for run in executor.instructions)]
    tape, shapes = executor.state.tape, executor.state.shapes

    def step() -> list[float]:
        """Run a step and return the seconds of each op.

        Drawing the microbatches, which comes before all ops, counts in equal parts for the ops that load them.
        """
        crowd.meet()
        clock.mark()
        executor.step()
        draw_seconds, *ops = clock.gaps()
        share = draw_seconds / MICROBATCHES
        return [seconds + share * (op.kind is OpKind.LOAD_BATCH) for op, seconds in zip(tape, ops, strict=True)]

    step()
    choose_products(device, alone=crowd.processes == 1)
    steps = iterations_for(crowd.mean(sum(step())), budget, at_least=3, at_most=50)
    calls: dict[OpKey, list[list[float]]] = defaultdict(list)
    for _ in range(steps):
        by_key: dict[OpKey, list[float]] = defaultdict(list)
        for op, seconds in zip(tape, step(), strict=True):
            by_key[_key_of(op)].append(seconds)
        by_key[ALL_UPDATES] = [sum(by_key[ALL_UPDATES])]
        for key, op_seconds in by_key.items():
            calls[key].append(op_seconds)
    ops: dict[OpKey, dict[int, Op]] = defaultdict(dict)
    for op in tape:
        if op.kind in MEASURED:
            ops[_key_of(op)][op.layer] = op
    for key, by_layer in ops.items():
        (op, *_), has_weights = by_layer.values(), key[0] not in (OpKind.LOSS, OpKind.LOAD_BATCH)
        elements = {layer: shapes.flat[layer] if has_weights else 0 for layer in by_layer}
        each_call = list(zip(*calls[key], strict=True))
        yield LayerPoint(
            layer=subject.layer_name(op),
            op=op.kind.value,
            width=model.hidden_size,
            rows=subject.rows,
            tokens=model.seq_len,
            elements=sum(elements.values()),
            dtype=subject.dtype,
            processes=crowd.processes,
            seconds=crowd.mean(fmean(map(median, each_call))),
            fastest=crowd.mean(fmean(map(min, each_call))),
            kernels=tuple(kernel for layer, op in by_layer.items() for kernel in subject.work(op, elements[layer])),
        )


def _key_of(op: Op) -> OpKey:
    """Return the key under which an op is timed. All updates share a key, since the last one does their work."""
    return ALL_UPDATES if op.kind is OpKind.UPDATE else (op.kind, op.layer)


def _with_mark(run: Callable[[], None], clock: Clock) -> Callable[[], None]:
    def run_and_mark() -> None:
        run()
        clock.mark()

    return run_and_mark
