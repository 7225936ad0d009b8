"""Compare a step of the preset `shakespeare-cpu` with a step of a plain loop in the style of nanoGPT, on one thread.

    python benchmarks/small_step.py

    python benchmarks/small_step.py --ranks 2

On several ranks, Shardlab's `ddp` is compared with torch's DistributedDataParallel. Both loops train in the same
processes and take turns: after each step of `shardlab.train`, a callback runs a step of the plain loop. A step of
Shardlab is therefore all that happens between two calls of the callback: the batch, the executor, the sum over the
ranks, records and display. The plain loop draws a batch, computes, clips, updates, and reads its loss in every step.
Times are CPU times of a process, with all threads, and wall times; the table has medians over turns. A ratio is that of
a step and the plain step after it.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median

import torch
import tyro
from gpu import PlainGPT
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import shardlab
from shardlab.common.files import processor_name
from shardlab.models import GPT
from shardlab.train import Callback, Training

MODEL = GPT(layers=4, hidden_size=128, heads=4, vocab_size=65, seq_len=64, bias=False, tied=True)
"""The model of the preset."""

SEQUENCES = 12
"""Sequences of a step, on all ranks together."""

CHARACTERS = "".join(map(chr, range(59, 59 + MODEL.vocab_size)))
WARM_UP = 10


@dataclass(frozen=True)
class Options:
    """Compare a small step with a plain loop's."""

    ranks: int = 1
    """Ranks of both loops."""

    turns: int = 200
    """Steps that are timed, of each loop."""

    json: bool = False
    """Print JSON alone."""


class PlainSteps(Callback):
    """Steps of the plain loop, one after each step of the training.

    Args:
        folder: rank 0 writes the times of its steps there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rows: list[dict[str, float]] = []

    def on_begin(self, training: Training) -> None:
        """Make the model and its optimizer."""
        ranks = training.run.config.plan.ranks
        torch.manual_seed(0)
        plain = PlainGPT(MODEL)
        self._module: nn.Module = DistributedDataParallel(plain) if ranks > 1 else plain
        groups = [[p for p in plain.parameters() if p.dim() == dims] for dims in (2, 1)]
        decay = [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(decay, lr=1e-3, betas=(0.9, 0.99), fused=True)
        self._tokens = torch.randint(MODEL.vocab_size, (100_000,))
        self._count = SEQUENCES // ranks
        self._since = time.process_time(), time.perf_counter()

    def on_step_end(self, training: Training) -> None:
        """Run a step of the plain loop."""
        middle = time.process_time(), time.perf_counter()
        self._step(training.run.config.optimizer.rate(training.state.step))
        after = time.process_time(), time.perf_counter()
        (cpu, wall), (our_cpu, our_wall) = difference(after, middle), difference(middle, self._since)
        self._rows.append({"cpu": our_cpu, "wall": our_wall, "plain_cpu": cpu, "plain_wall": wall})
        self._since = time.process_time(), time.perf_counter()

    def on_end(self, training: Training) -> None:
        """Write the times."""
        if training.rank == 0:
            (self._folder / "times.json").write_text(json.dumps(self._rows[WARM_UP:]))

    def _batch(self) -> tuple[Tensor, Tensor]:
        starts = [int(start) for start in torch.randint(len(self._tokens) - MODEL.seq_len, (self._count,))]
        inputs, targets = (
            torch.stack([self._tokens[start + after : start + after + MODEL.seq_len] for start in starts])
            for after in (0, 1)
        )
        return inputs, targets

    def _step(self, rate: float) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss: Tensor = self._module(*self._batch())
        loss.backward()
        nn.utils.clip_grad_norm_(self._module.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.item()


def difference(after: Sequence[float], before: Sequence[float]) -> tuple[float, float]:
    """Seconds of the CPU and of the wall clock between two moments."""
    return after[0] - before[0], after[1] - before[1]


def times(options: Options) -> list[dict[str, float]]:
    """Seconds of each turn, on rank 0."""
    with tempfile.TemporaryDirectory(prefix="shardlab-") as place:
        folder = Path(place)
        text = folder / "text.txt"
        text.write_text("".join(Random(0).choices(CHARACTERS, k=200_000)), encoding="utf-8")
        prepare = ["data", "prepare", str(text), "--tokenizer", "chars", "--out", str(folder / "data")]
        subprocess.run([sys.executable, "-m", "shardlab", *prepare], check=True, stdout=subprocess.DEVNULL)
        os.environ["OMP_NUM_THREADS"] = "1"
        shardlab.train(
            preset="shakespeare-cpu",
            data=[str(folder / "data")],
            steps=WARM_UP + options.turns,
            microbatches=options.ranks,
            micro_batch_size=SEQUENCES // options.ranks,
            dp_replicate=options.ranks,
            out=str(folder / "run"),
            callbacks=[PlainSteps(folder)],
        )
        return json.loads((folder / "times.json").read_text())


def summary(rows: Sequence[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Medians by clock: milliseconds of a step of each loop, and their ratio."""
    return {
        clock: {
            "shardlab_ms": 1e3 * median(row[clock] for row in rows),
            "plain_ms": 1e3 * median(row[f"plain_{clock}"] for row in rows),
            "ratio": median(row[clock] / row[f"plain_{clock}"] for row in rows),
        }
        for clock in ("cpu", "wall")
    }


def main(options: Options) -> None:
    found = summary(times(options))
    if options.json:
        print(json.dumps({"processor": processor_name(), **found}, indent=2))
        return
    print(f"{processor_name()}, torch {torch.__version__}, {options.ranks} ranks, medians of {options.turns} turns")
    for clock, row in found.items():
        print(f"{clock:5}", "  ".join(f"{name} {value:.3f}" for name, value in row.items()))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
