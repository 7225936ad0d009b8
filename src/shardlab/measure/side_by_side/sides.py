"""What takes turns on one rank: PyTorch's side of a pair, ours, and the floor below both."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from shardlab.execute import Executor, Settings
from shardlab.measure.side_by_side.contender import Contender, DrawnBatches, Loop
from shardlab.measure.side_by_side.data_parallel import WRAPPERS
from shardlab.measure.side_by_side.floor import Floor
from shardlab.measure.side_by_side.module import GPTModule, gpt_module
from shardlab.measure.side_by_side.pairs import MICROBATCHES, OPTIMIZER, SEED, Size, StrategyPair
from shardlab.measure.side_by_side.pipeline import Pipeline, stages_of
from shardlab.measure.side_by_side.tensor_parallel import TensorParallelLoop, tensor_parallel
from shardlab.train.launch import backend_of

Make = Callable[[], Contender]

SIDES = ("theirs", "ours", "floor")
"""What takes turns, in this order."""


def makers(pair: StrategyPair, size: Size, ranks: int, rank: int, device: torch.device) -> Mapping[str, Make]:
    """What makes each side on this rank, by `SIDES`; all ranks make the same side together."""
    job = pair.job(size, ranks)
    batches = DrawnBatches(job.micro_batch_size, job.microbatches, size.model.seq_len, size.model.vocab_size)

    def ours() -> Contender:
        settings = Settings(SEED, job.numbers, device, OPTIMIZER)
        return Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))

    def theirs() -> Contender:
        if pair.family == "pipeline":
            return Pipeline(pair, size, ranks, rank, batches, device)
        module = gpt_module(size.model, range(size.model.layers), SEED, device)
        if pair.family == "tensor":
            return TensorParallelLoop(module, tensor_parallel(module, ranks), batches, 0, device, reports=rank == 0)
        return Loop(*WRAPPERS[pair.name](module, ranks), batches, rank, device)

    return {"theirs": theirs, "ours": ours, "floor": lambda: floor_of(pair, size, ranks, rank, device)}


def floor_of(pair: StrategyPair, size: Size, ranks: int, rank: int, device: torch.device) -> Floor:
    """A rank's share of the work, with nothing between the ranks."""
    model, every = size.model, range(size.model.layers)
    rows = pair.job(size, ranks).micro_batch_size
    if pair.family == "pipeline":
        stages = stages_of(pair, size, ranks, rank).values()
        return Floor(model, [GPTModule(model, layers).to(device) for layers in stages], rows, MICROBATCHES)
    slices = ranks if pair.family == "tensor" else 1
    modules = [GPTModule(model, every, slices).to(device)]
    return Floor(model, modules, rows, 1, one_in=pair.shards(ranks))
