"""What the launch tests run on every rank."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardlab.execute import Executor, Settings
from shardlab.language import Holds, UserError
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job, Tracing
from shardlab.train.launch.ranks import run_ranks
from shardlab.train.tracing import TracedExecutor


def sum_of_ranks(rank: int, device: torch.device, addend: int) -> float:
    total = torch.ones(1, device=device) * rank
    dist.all_reduce(total)
    return total.item() + addend


def threads(rank: int, device: torch.device) -> float:
    return torch.get_num_threads()


def raise_on(rank: int, device: torch.device, failing: int) -> None:
    if rank == failing:
        raise ValueError("the batch is a fish")
    dist.barrier()


def die_on(rank: int, device: torch.device, failing: int, number: int = signal.SIGKILL) -> None:
    if rank == failing:
        os.kill(os.getpid(), number)
    dist.barrier()


def die_while_traced(rank: int, device: torch.device, job: Job, folder: Path) -> None:
    """Rank 1 is killed in the second of the steps that are recorded."""

    def die(layer: int, holds: Holds, gradient: torch.Tensor) -> None:
        if rank == 1 and executor.state.step == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    corpus = Corpus.split(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers), observer=die)
    tracer = TracedExecutor(executor, job, folder, Tracing(warm_up=1, timed=3, measured=1))
    for _ in range(5):
        tracer.step()


def connect_slowly(rank: int, environments: Sequence[Mapping[str, str]], mark: Path) -> bool:
    """Whether rank 1, which takes a second more to connect, has done so when another rank's function is called."""
    connect = dist.init_process_group

    def slowly(*arguments: Any, **named: Any) -> None:
        connect(*arguments, **named)
        if rank == 1:
            time.sleep(1)
            mark.touch()

    os.environ.update(environments[rank])
    with patch.object(dist, "init_process_group", slowly):
        return run_ranks(len(environments), exists, mark)


def exists(rank: int, device: torch.device, mark: Path) -> bool:
    return mark.exists()


def lose(rank: int, device: torch.device) -> None:
    """Rank 1 loses its connection; rank 0 does not notice."""
    if rank == 1:
        raise RuntimeError("Connection closed by peer")
    time.sleep(60)


def complain(rank: int, device: torch.device) -> None:
    if rank == 1:
        raise UserError("the fish is not a batch; give a batch")
    dist.barrier()
