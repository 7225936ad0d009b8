"""Measure the gain of overlapping the reductions of gradients: one at a time, against those of a whole block.

    python benchmarks/overlap.py

The model is divided into half-blocks, because its head is tied to its embedding. Two programs follow one plan on the
same processes and alternate step by step. In the first, a reduction waits for the previous one. In the second, all
reductions of a block are in flight, as in plans. Times are medians over the steps of rank 0. `ratio` is the median over
turns of the second program's time over the first one's, and `middle half` is the range of the middle half of them.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from statistics import median, quantiles
from unittest.mock import patch

import torch
import torch.distributed as dist
import tyro

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.models import GPT
from shardlab.strategies.plan import resolve
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.ranks import backend_of, run_ranks

WARM_UP = 3


@dataclass(frozen=True)
class Options:
    """Time steps with one reduction in flight, and with all reductions of a block in flight."""

    ranks: int = 2
    """Data-parallel processes."""

    turns: int = 40
    """Steps of each program that are timed."""

    layers: int = 8
    """Blocks of the model."""

    width: int = 256
    """Features of the model."""

    json: bool = False
    """Print JSON alone."""


def job_of(options: Options) -> Job:
    plan = Plan(Mesh(dp_shard=options.ranks))
    model = GPT(layers=options.layers, hidden_size=options.width, heads=4, seq_len=64, vocab_size=256, tied=True)
    return Job(plan, options.ranks, options.ranks, model, 1)


def executor_of(job: Job, rank: int, device: torch.device, steps: int) -> Executor:
    corpus = Corpus.open((), job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, device, OptimizerConfig(schedule_steps=steps, warmup_steps=0))
    return Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))


def on_a_rank(rank: int, device: torch.device, options: Options) -> list[tuple[float, float]]:
    """Seconds of each turn's two steps."""
    job, steps = job_of(options), WARM_UP + options.turns
    with patch.object(resolve, "largest_block", return_value=0):  # no room beside the one under way
        one = executor_of(job, rank, device, steps)
    executors = (one, executor_of(job, rank, device, steps))
    turns: list[tuple[float, float]] = []
    for _ in range(steps):
        seconds: list[float] = []
        for executor in executors:
            dist.barrier()
            began = time.perf_counter()
            executor.step()
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
        turns.append((seconds[0], seconds[1]))
    return turns[WARM_UP:]


def main(options: Options) -> None:
    load = os.getloadavg()[0]
    turns = run_ranks(options.ranks, on_a_rank, options)
    one, block = (median(turn[which] for turn in turns) for which in (0, 1))
    ratios = [block / one for one, block in turns]
    low, ratio, high = quantiles(ratios, n=4)
    found = {"one_s": one, "block_s": block, "ratio": ratio, "middle_half": [low, high], "load_before": load}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    print(f"one in flight   {1000 * one:.1f} ms")
    print(f"a block's       {1000 * block:.1f} ms")
    print(f"ratio           {ratio:.3f}, middle half {low:.3f} to {high:.3f}, of {len(turns)} turns")
    print(f"load before     {load:.1f}")


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
