"""Measure the cost of the clock of forward and backward passes (dtf, dtb), by alternating steps with and without it.

    python benchmarks/clock_overhead.py

Both kinds of step run with one executor in one process, so that nothing else differs. The small model computes for some
milliseconds between two readings of the clock. The tiny model hardly computes, so that the overhead of its ops is most
of its step. On a CPU, times are the CPU time of the process, so that other processes matter little. `ratio` is the
median over turns of the time of a step with the clock over that of the adjacent step without it, and `middle half` is
the range of the middle half of these ratios.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import tyro
from rich.console import Console
from rich.table import Table

from shardlab.execute.executor import Executor
from shardlab.execute.recording import ComputeClock
from shardlab.execute.settings import Settings
from shardlab.models import GPT
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job
from shardlab.train.launch.ranks import pick_device

WARM_UP = 5

MODELS = {
    "small": (GPT(layers=4, hidden_size=128, heads=4, vocab_size=256, seq_len=64), 8),
    "tiny": (GPT(layers=8, hidden_size=8, heads=1, vocab_size=16, seq_len=4), 1),
}
"""Models with the sequences of a microbatch; a step has four microbatches."""


@dataclass(frozen=True)
class Options:
    """Time steps with the clock and without it, in turns."""

    turns: int = 200
    """Pairs of steps of each model."""

    repeat: int = 5
    """Repetitions of the whole measurement; each has a line."""

    json: bool = False
    """Print JSON alone."""


def ratios(name: str, turns: int, device: torch.device) -> tuple[list[float], float]:
    """Each turn's ratio, and the median seconds of a step without the clock."""
    model, sequences = MODELS[name]
    job = Job("single", 1, 4, model, sequences)
    batches = Batches(Corpus.from_text(bytes(range(16)) * 4096, model.seq_len), model.seq_len, sequences, 4, 0)
    executor = Executor(job.checked(), 0, job.cut, batches, Settings(device=device))
    plain = list(executor.instructions)
    clock = ComputeClock(executor)
    clocked = executor.instructions
    now = time.perf_counter if device.type == "cuda" else time.process_time

    def seconds(timed: bool) -> float:
        executor.instructions = clocked if timed else plain
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = now()
        executor.step()
        if timed:
            clock.read()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return now() - start

    found: list[float] = []
    without: list[float] = []
    for turn in range(WARM_UP + turns):
        order = (True, False) if turn % 2 else (False, True)
        took = {timed: seconds(timed) for timed in order}
        if turn >= WARM_UP:
            found.append(took[True] / took[False])
            without.append(took[False])
    return found, median(without)


def main(options: Options) -> None:
    torch.set_num_threads(1)
    device = pick_device()
    rows: list[dict[str, float | str]] = []
    for _ in range(options.repeat):
        for name in MODELS:
            found, step = ratios(name, options.turns, device)
            low, _, high = quantiles(found, n=4)
            rows.append({"model": name, "step_s": step, "ratio": median(found), "low": low, "high": high})
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("model", "ms/step", "ratio", "middle half", box=None, header_style="dim")
    for row in rows:
        spread = f"{row['low']:.4f} to {row['high']:.4f}"
        table.add_row(str(row["model"]), f"{1000 * float(row['step_s']):.2f}", f"{row['ratio']:.4f}", spread)
    Console(highlight=False).print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
