"""Alternation of the sides of a comparison: PyTorch's, ours, and a lower bound of both.

`compare_rank` compares a strategy with PyTorch, `time_passes_rank` a program before and after each of its passes, and
`race_rank` several jobs. All of them alternate steps in the same processes, so that other load of the machine slows
them down equally.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor

from shardlab.common.fields import SHORTEST_SECONDS
from shardlab.execute.executor import Executor
from shardlab.execute.kernel_choice import choose_products
from shardlab.execute.settings import Settings
from shardlab.execute.transport.collectives import Groups, transport_of
from shardlab.execute.transport.neighbours import Neighbours
from shardlab.execute.transport.shared_transport import SharedTransport
from shardlab.language import UserError
from shardlab.measure.collectives import MeasuringRanks
from shardlab.measure.progress import Race
from shardlab.measure.side_by_side.contender import (
    Contender,
    DrawnBatches,
    GPTModule,
    Loop,
    LowerBound,
    gpt_module,
    measure_memory,
)
from shardlab.measure.side_by_side.pytorch import (
    WRAPPERS,
    Pipeline,
    TensorParallelLoop,
    TorchRanks,
    stages_of,
    tensor_parallel,
)
from shardlab.measure.side_by_side.results import (
    LOSSES_AGREE,
    MICROBATCHES,
    OPTIMIZER,
    SEED,
    SHARED,
    Comparison,
    Side,
    Size,
    Spread,
    StrategyPair,
    loss_difference,
    spread_of,
)
from shardlab.models.tensors.compute import kernel_choices
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.data.prepared_folder import find_tokenizer
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of

Make = Callable[[], Contender]

SIDES = ("theirs", "ours", "plain")
"""Names of the sides, in the order of their steps. "plain" is `LowerBound`."""


def side_makers(
    pair: StrategyPair, size: Size, ranks: int, rank: int, device: torch.device, transport: str
) -> Mapping[str, Make]:
    """Return a function for each of `SIDES` that creates the side on this rank. All ranks call it together.

    Args:
        transport: transport of both sides: "shared", or the name of the default process group's backend.
    """
    job = pair.job(size, ranks)
    batches = DrawnBatches(job.micro_batch_size, job.microbatches, size.model.seq_len, size.model.vocab_size)

    def ours() -> Contender:
        settings = Settings(SEED, job.numbers, device, OPTIMIZER)
        with nullcontext() if transport == SHARED else Neighbours.not_used():
            return Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))

    def theirs() -> Contender:
        world = TorchRanks(ranks, transport)
        if pair.family == "pipeline":
            return Pipeline(pair, size, world, rank, batches, device)
        module = gpt_module(size.model, range(size.model.layers), SEED, device)
        if pair.family == "tensor":
            return TensorParallelLoop(module, tensor_parallel(module, world), batches, 0, device, reports=rank == 0)
        return Loop(*WRAPPERS[pair.name](module, world), batches, rank, device)

    return {"theirs": theirs, "ours": ours, "plain": lambda: lower_bound_of(pair, size, ranks, rank, device)}


def lower_bound_of(pair: StrategyPair, size: Size, ranks: int, rank: int, device: torch.device) -> LowerBound:
    """Return the contender that computes a rank's share of the work without communication."""
    model, all_layers = size.model, range(size.model.layers)
    rows = pair.job(size, ranks).micro_batch_size
    if pair.family == "pipeline":
        stages = stages_of(pair, size, ranks, rank).values()
        return LowerBound(model, [GPTModule(model, layers).to(device) for layers in stages], rows, MICROBATCHES)
    slices = ranks if pair.family == "tensor" else 1
    modules = [GPTModule(model, all_layers, slices).to(device)]
    return LowerBound(model, modules, rows, 1, one_in=pair.shards(ranks))


WARM_UP = 3
"""Number of first steps of each side, which allocate memory and open connections. Peak memory is that of the last."""


def compare_rank(
    rank: int, device: torch.device, pair: StrategyPair, size: Size, turns: int, transport: str = ""
) -> Comparison:
    """Run one rank's part of a comparison. Every rank returns the same result.

    Args:
        turns: number of timed steps of each side.
        transport: "shared", or the device's backend, for both sides (empty: shared memory if all ranks can share it,
            otherwise the device's backend: gloo, or NCCL on a GPU).

    Raises:
        UserError: if the transport is not available.
    """
    transport = find_transport(device, transport)
    makes = side_makers(pair, size, dist.get_world_size(), rank, device, transport)
    return replace(compare_sides(makes, turns, device), transport=transport)


def find_transport(device: torch.device, transport: str = "") -> str:
    """Return the transport of both sides: `transport` or, if it is empty, the fastest one that these ranks can use.

    Raises:
        UserError: if the requested transport is not available.
    """
    world, backend = dist.group.WORLD, backend_of(device.type)
    assert world is not None, "the default process group exists"
    shares = isinstance(transport_of(world), SharedTransport)
    if transport not in ("", backend, *([SHARED] if shares else [])):
        why_not = "the ranks share no memory here" if transport == SHARED else "this is no transport of these ranks"
        raise UserError(f"--transport {transport}: {why_not}; give --transport {backend}")
    return transport or (SHARED if shares else backend)


def compare_sides(makes: Mapping[str, Make], turns: int, device: torch.device) -> Comparison:
    """Create all sides by the functions in `makes`, alternate their steps, and return the comparison."""
    sides, losses = take_turns(makes, [(SIDES[1], SIDES[0], *SIDES[2:]), SIDES], turns, device)
    return Comparison(sides["ours"], sides["theirs"], sides["plain"], losses["ours"], losses["theirs"])


@kernel_choices({})
def take_turns(
    makes: Mapping[str, Make], orders: Sequence[Sequence[str]], turns: int, device: torch.device
) -> tuple[dict[str, Side], dict[str, list[float]]]:
    """Create contenders, warm them up one after the other, and alternate their steps.

    Args:
        makes: function that creates each contender, by name.
        orders: orders of the contenders, used cyclically by the turns; equal on all ranks.
        turns: number of timed steps of each contender.

    Returns:
        The timed steps of each contender, and the mean loss of every step, including warm-up.
    """
    contenders: dict[str, Contender] = {}
    losses: dict[str, list[Tensor]] = {}
    peaks: dict[str, int] = {}
    for side, make in makes.items():
        contenders[side], losses[side], peaks[side] = measure_memory(make, WARM_UP, device)
    choose_products(device)
    seconds: dict[str, list[float]] = {side: [] for side in makes}
    computing: dict[str, list[float]] = {side: [] for side in makes}
    gc.collect()
    for turn in range(turns):
        for side in orders[turn % len(orders)]:
            loss, step_seconds, cpu_seconds = _time_step(contenders[side], device)
            losses[side].append(loss)
            seconds[side].append(step_seconds)
            computing[side].append(cpu_seconds)

    def over_ranks(numbers: Sequence[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        total = torch.tensor(numbers, dtype=torch.float64, device=device)
        dist.all_reduce(total, op)
        return total.tolist()

    ranks = dist.get_world_size()
    sides = {
        side: Side(
            over_ranks(seconds[side], dist.ReduceOp.MAX),
            [total / ranks for total in over_ranks(computing[side], dist.ReduceOp.SUM)],
            int(over_ranks([float(peaks[side])], dist.ReduceOp.MAX)[0]),
        )
        for side in makes
    }
    return sides, {side: _mean_losses(losses[side]) for side in makes}


def _time_step(contender: Contender, device: torch.device) -> tuple[Tensor, float, float]:
    """Run one step, and return its loss, its seconds, and the CPU seconds of this thread."""
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.thread_time()
    loss = contender.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return loss, max(SHORTEST_SECONDS, time.perf_counter() - start), time.thread_time() - cpu_start


def _mean_losses(losses: Sequence[Tensor]) -> list[float]:
    """Return the mean loss of each step over the tokens of all ranks."""
    total = torch.stack([*losses])
    dist.all_reduce(total)
    return (total[:, 0] / total[:, 1]).tolist()


@dataclass(frozen=True)
class PassTurns:
    """Timed steps of a program without passes, and after each of its passes.

    Attributes:
        sides: timed steps of each variant.
        losses: mean loss of every step of each variant, including warm-up.
    """

    sides: list[Side]
    losses: list[list[float]]

    @property
    def loss_error(self) -> float:
        """Largest relative difference of a loss from that of the program without passes."""
        return max(loss_difference(losses, self.losses[0]) for losses in self.losses)

    @property
    def agrees(self) -> bool:
        """Whether the losses of all variants agree. Otherwise, their times have no meaning."""
        return self.loss_error <= LOSSES_AGREE

    @property
    def gains(self) -> list[Spread]:
        """Share of a step that each pass saves, relative to the variant before it in the same turn."""
        return [gain(side, previous) for previous, side in pairwise(self.sides)]

    @property
    def gain(self) -> Spread:
        """Share of a step that all passes together save."""
        return gain(self.sides[-1], self.sides[0])


def gain(side: Side, previous: Side) -> Spread:
    """Return the share by which one side's steps are shorter than another's in the same turn."""
    return spread_of([1 - a / b for a, b in zip(side.seconds, previous.seconds, strict=True)])


def time_passes_rank(
    rank: int, device: torch.device, pair: StrategyPair, size: Size, passes: Sequence[str], turns: int
) -> PassTurns:
    """Run one rank's part of timing the passes of a pair's program. Every rank returns the same result.

    Args:
        rank: number of the rank.
        device: device of the rank.
        pair: pair with the strategy.
        size: the model and its batch.
        passes: passes of each variant. The first variant has none.
        turns: number of timed steps of each variant.
    """
    ranks = dist.get_world_size()
    transport = find_transport(device)
    makes = {
        variant: side_makers(replace(pair, passes=variant), size, ranks, rank, device, transport)["ours"]
        for variant in passes
    }
    orders = [passes, passes[::-1]]
    sides, losses = take_turns(makes, orders, turns, device)
    return PassTurns([sides[variant] for variant in passes], [losses[variant] for variant in passes])


@kernel_choices({})
def race_rank(rank: int, device: torch.device, jobs: Sequence[Job], turns: Race) -> list[float]:
    """Return the seconds of a step of every job: the median over rounds of the time on the slowest rank.

    Every rank returns the same result.

    In each round, every job runs a warm-up step and a timed step, so that other load of the machine slows all jobs down
    equally. Every second round has the reverse order. The weights of all jobs are in memory at the same time.
    """
    world, groups = MeasuringRanks(rank, device), Groups()
    began = time.perf_counter()
    executors = [_executor(job, world, groups, turns) for job in jobs]
    active = list(range(len(jobs)))
    for index in active:
        executors[index].step()  # allocates memory, and opens connections
    choose_products(device)
    times: list[list[float]] = [[] for _ in jobs]
    for number in range(turns.rounds):
        for index in active[:: 1 if number % 2 else -1]:
            executors[index].step()
            world.meet()
            start = time.perf_counter()
            executors[index].step()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times[index].append(world.max(time.perf_counter() - start))
        active = turns.select_jobs(active, times)
        if world.max(time.perf_counter() - began) > turns.seconds:
            break
    if device.type == "cuda":  # later measurements in this process count memory from here
        executors.clear()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    return [median(job_times) for job_times in times]


def _executor(job: Job, world: MeasuringRanks, groups: Groups, turns: Race) -> Executor:
    tokenizer = None if turns.init is None else find_tokenizer(turns.init)
    corpus = Corpus.open(turns.data, job.model.seq_len, tokenizer=tokenizer)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, world.device, turns.optimizer)
    backend = backend_of(world.device.type)
    return Executor(job.checked(), world.rank, job.cut, batches, settings, backend, groups=groups)
