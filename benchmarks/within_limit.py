"""Train a model whose state exceeds the memory limit of its ranks, and compare its losses with those without a limit.

python benchmarks/within_limit.py [--ranks 2] [--layers 50] [--hidden-size 384] [--room 176] [--steps 4]

A rank may use `--room` MiB more than it uses before it trains (setrlimit(RLIMIT_DATA) of Linux: private writable memory
without files). It trains four times: without a limit; within it, with weights and optimizer state on the disk; the
same, resumed from the checkpoint after half of the steps; and within it with everything in memory, which must be
refused.
"""

from __future__ import annotations

import json
import re
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch
import tyro

from shardlab.common.errors import UserError
from shardlab.language.pass_names import with_offload
from shardlab.models import GPT
from shardlab.train.config import LoopConfig, SavingConfig, StrategyConfig, TrainingConfig
from shardlab.train.launch.ranks import run_ranks, set_heap
from shardlab.train.loop import train_rank
from shardlab.train.run import Summary, TrainingRun

MIB = 2**20
AWAY = with_offload("update-early", ["parameters=disk", "optimizer=disk"])


def taken() -> int:
    """Bytes of private memory of this process."""
    found = re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None, "Linux says so"
    return 1024 * int(found[1])


def train(rank: int, device: torch.device, run: TrainingRun, room: int | None) -> Summary | None:
    """Train on a rank that may take `room` bytes more than it has taken already."""
    if room is not None:
        limit = taken() + room
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        set_heap()
        if rank == 0:
            print(f"a rank may take {limit / MIB:.0f} MiB in all, {room / MIB:.0f} MiB more than before", flush=True)
    return train_rank(rank, device, run)


def losses(out: Path) -> list[float]:
    """Loss of each step of a run."""
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def main(
    ranks: int = 2, layers: int = 50, hidden_size: int = 384, room: int = 176, steps: int = 4, strategy: str = "fsdp"
) -> int:
    """Train with and without a limit.

    Args:
        ranks, layers, hidden_size: number of processes, and size of the model.
        room: MiB that a rank may take beyond its memory before training.
        steps: number of steps of each run.
        strategy: name of a built-in strategy.
    """
    model = GPT(layers=layers, hidden_size=hidden_size, heads=4, seq_len=32)
    state = 12 * model.parameter_count // ranks
    print(f"{model.parameter_count:,} parameters: weights and optimizer state take {state / MIB:.0f} MiB of each rank")
    with tempfile.TemporaryDirectory() as folder:

        def run(name: str, passes: str, room: int | None, resume: Path | None = None) -> list[float]:
            began, out = time.monotonic(), Path(folder, name)
            config = TrainingConfig(
                model=model,
                plan=StrategyConfig(strategy, ranks, strategy, passes),
                train=LoopConfig(steps, 2, 1),
                saving=SavingConfig(save_every=steps // 2),
            )
            run_ranks(ranks, train, TrainingRun(config, out, resume=resume, continues=resume is not None), room)
            seconds = time.monotonic() - began
            found = losses(out)
            print(f"{name:<20}{seconds:6.1f} s  losses {' '.join(f'{loss:.6f}' for loss in found)}", flush=True)
            return found

        whole = run("without a limit", "none", None)
        name = f"within {room} MiB"
        within = run(name, AWAY, room * MIB)
        saved = Path(folder, name, "checkpoints", f"step-{steps // 2:06}")
        shutil.rmtree(saved.with_name(f"step-{steps:06}"))
        again = run(name, AWAY, room * MIB, saved)
        try:
            run("all in memory", "none", room * MIB)
        except UserError as refused:
            print(f"{'all in memory':<20}{refused}")
        else:
            print("all in memory: it was not refused")
            return 1
    same = within == whole and again == whole
    print("the losses are the same" if same else "the losses differ")
    return 0 if same and state > room * MIB else 1


if __name__ == "__main__":
    raise SystemExit(tyro.cli(main))
