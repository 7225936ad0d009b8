"""Functions that the launch tests run on every rank."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
import torch.distributed as dist

from shardlab.cli import main
from shardlab.cli.train.before_ranks import failures_as_exit, line_lookup
from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.language import Holds, UserError
from shardlab.models import find_model
from shardlab.strategies.load import load
from shardlab.train import checkpoints
from shardlab.train.batches import Batches
from shardlab.train.config import DataConfig, LoggingConfig, LoopConfig, StrategyConfig, TrainingConfig
from shardlab.train.data import Corpus
from shardlab.train.faults import WatchSettings
from shardlab.train.job import Job, Tracing
from shardlab.train.launch.ranks import run_ranks
from shardlab.train.loop import train_rank
from shardlab.train.run import Summary, TrainingRun
from shardlab.train.tracing import TracedExecutor
from tests.train import faulty


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

    corpus = Corpus.from_text(bytes(range(256)) * 8, job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, 0)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers), observer=die)
    tracer = TracedExecutor(executor, job, folder, Tracing(warm_up=1, timed_steps=3, measured_steps=1))
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


# Training runs, made of a job and an optimizer.


def run_of(
    job: Job,
    optimizer: OptimizerConfig,
    out: Path,
    *,
    data: tuple[str, ...] = (),
    init: Path | None = None,
    tracing: Tracing | None = None,
) -> TrainingRun:
    """A run of as many steps as the optimizer's schedule has; it is traced if it is said how."""
    config = TrainingConfig(
        model=job.model,
        plan=StrategyConfig(job.strategy, job.ranks, job.name),
        data=DataConfig(data),
        optimizer=optimizer,
        train=LoopConfig(optimizer.schedule_steps, job.microbatches, job.micro_batch_size, job.seed, init),
        logging=LoggingConfig(trace=tracing is not None),
    )
    return TrainingRun(config, out, "shardlab train", tracing or Tracing())


_commit = checkpoints.commit


def commit_and_wait(disk: Any, folder: Path, *rest: Any) -> None:
    """Complete a checkpoint. If its name begins with HELD_AT, write nothing more until the file HELD_UNTIL exists."""
    _commit(disk, folder, *rest)
    while folder.name.startswith(os.environ["HELD_AT"]) and not os.path.exists(os.environ["HELD_UNTIL"]):
        time.sleep(0.02)


def run_held_command() -> int:
    """Run a command line of `shardlab` whose run waits at checkpoints, so that a test can act on it in time.

    It writes its process id to the file HELD_PID, if that is given.
    """
    checkpoints.commit = commit_and_wait
    if "HELD_PID" in os.environ:
        Path(os.environ["HELD_PID"]).write_text(str(os.getpid()))
    return main()


def run_faulty_rank(fault: str) -> None:
    """Train as a rank of torchrun that has a fault until it is restarted."""
    program = Path(__file__).parents[2] / "examples" / "my_strategy.py"
    job = Job(f"{program}:my_ddp", 2, 2, find_model("mlp"), 1)
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    with failures_as_exit():
        watching = WatchSettings(3.0, job.checked(), line_lookup(load(job.strategy), job))
        run_ranks(2, faulty.train, job, fault, 1 if first else -1, 5, watching=watching)
    os.write(2, b"all steps taken\n")  # at once, since two ranks say so


if __name__ == "__main__":  # python -m tests.train.jobs COMMAND-LINE or FAULT
    if "HELD_UNTIL" in os.environ:
        sys.exit(run_held_command())
    run_faulty_rank(sys.argv[1])


# Training as a rank does, by a clock that no machine can stop, and without what takes longer than the steps.


@contextmanager
def ticking() -> Generator[pytest.MonkeyPatch]:
    """A millisecond passes from each look at the clock to the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("time.perf_counter", partial(next, count(0.0, 1e-3)))
        yield patch


def train_by_ticks(rank: int, run: TrainingRun) -> Summary | None:
    """Train on every rank; rank 0 returns the summary."""
    with ticking():
        return train_rank(rank, torch.device("cpu"), run)


def train_plainly(rank: int, run: TrainingRun) -> Summary | None:
    """Train on every rank without the last sample; rank 0 returns the summary."""
    with ticking() as patch:
        patch.setattr("shardlab.train.callbacks.continue_prompt", Mock(return_value=""))
        return train_rank(rank, torch.device("cpu"), run)
