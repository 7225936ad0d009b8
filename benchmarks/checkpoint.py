"""Measure the cost of a checkpoint: how long the steps stop, and the speed of writing beside the disk's own speed.

python benchmarks/checkpoint.py [--hidden-size 512] [--ranks 2] [--folder DISK]
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import tyro

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.checkpoint.read import Checkpoint
from shardlab.train.checkpoint.write import folder_of
from shardlab.train.checkpoints import Saver
from shardlab.train.config import LoopConfig, SavingConfig, StrategyConfig, TrainingConfig
from shardlab.train.data import Corpus
from shardlab.train.launch.ranks import run_ranks
from shardlab.train.run import TrainingRun


@dataclass(frozen=True)
class Save:
    """Seconds of one save.

    Attributes:
        bytes: size of the checkpoint.
        stall: seconds for which no step could run.
        whole: seconds from the end of the stall until the checkpoint was complete.
        disk: seconds that the disk takes to write and sync a file of `bytes`.
        step, beside: seconds of a step alone, and of one during a save.
    """

    bytes: int
    stall: float
    whole: float
    disk: float
    step: float
    beside: float


def measure(rank: int, device: torch.device, run: TrainingRun, saves: int) -> list[Save]:
    """One rank's part."""
    job = run.job
    corpus = Corpus.open((), job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    executor = Executor(job.checked(), rank, job.cut, batches, Settings(job.seed, job.numbers, device))
    saver = Saver(executor, run, batches)
    found: list[Save] = []
    for _ in range(saves):
        alone = steps(executor, 2)
        began = time.perf_counter()
        stall = saver.save()
        saver.settle()
        saver.wait()
        whole = time.perf_counter() - began
        size = Checkpoint.open(folder_of(run.out / "checkpoints", executor.state.step)).size if rank == 0 else 0
        disk = write(run.out / "raw", size) if rank == 0 else 0.0
        steps(executor, 1)
        saver.save()
        beside = steps(executor, 2)
        saver.settle()
        found.append(Save(size, stall, whole, disk, median(alone), median(beside)))
    return found


def steps(executor: Executor, count: int) -> list[float]:
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        executor.step()
        times.append(time.perf_counter() - began)
    return times


def write(path: Path, size: int) -> float:
    """Seconds to write and sync a file of so many bytes."""
    chunk = os.urandom(2**20)
    began = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for start in range(0, size, len(chunk)):
            file.write(chunk[: size - start])
        os.fsync(file.fileno())
    return time.perf_counter() - began


def main(hidden_size: int = 512, layers: int = 4, ranks: int = 2, saves: int = 5, folder: Path | None = None) -> None:
    """Save a model's state a few times, and print medians; the first save, which allocates memory, is printed apart."""
    load = os.getloadavg()[0]
    out = Path(tempfile.mkdtemp(dir=folder))
    config = TrainingConfig(
        model=GPT(layers=layers, hidden_size=hidden_size, heads=8, seq_len=64),
        plan=StrategyConfig("fsdp", ranks, "fsdp"),
        train=LoopConfig(microbatches=ranks, micro_batch_size=1),
        saving=SavingConfig(keep=1),
    )
    try:
        first, *others = run_ranks(ranks, measure, TrainingRun(config, out), saves)
    finally:
        shutil.rmtree(out)
    middle = {name: median(vars(each)[name] for each in others) for name in vars(first)}
    size = middle["bytes"]
    rates = {name: f"{size / middle[name] / 1e6:.0f} MB/s" for name in ("whole", "disk")}
    rows = {
        "stall": (middle["stall"], f"{middle['stall'] / middle['whole']:.1%} of the save"),
        "first stall": (first.stall, "takes its memory"),
        "save": (middle["whole"], rates["whole"]),
        "disk alone": (middle["disk"], rates["disk"]),
        "step": (middle["step"], f"{1e3 * middle['beside']:.1f} ms beside a save"),
    }
    print(f"{size / 1e6:.0f} MB by {ranks} ranks, medians of {len(others)} saves after the first")
    for name, (seconds, text) in rows.items():
        print(f"{name:12} {1e3 * seconds:8.1f} ms  {text}")
    print(f"load before  {load:8.1f}")


if __name__ == "__main__":
    tyro.cli(main)
