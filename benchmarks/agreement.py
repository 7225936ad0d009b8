"""Measure how well predictions agree with measured steps on this machine, for many strategies.

    python benchmarks/agreement.py

First, `shardlab bench` measures the machine's collectives, and the layers of models of other sizes than those that are
run here. The prediction knows only this profile. Then every case is traced on real processes, and its median step and
its memory are compared with the prediction. Nothing else may run on the machine. docs/agreement.md has a result.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import torch
import tyro
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

from shardlab.execute.executor import Executor
from shardlab.execute.settings import Settings
from shardlab.language import Mesh
from shardlab.language.precision import PRECISIONS
from shardlab.measure.profile import this_machine
from shardlab.models import GPT, Llama
from shardlab.simulate.hardware import Cluster, Profile
from shardlab.simulate.predict.estimate import estimate
from shardlab.simulate.predict.prices import ClusterPrices
from shardlab.simulate.timeline.measured import compare, read_trace
from shardlab.simulate.timeline.memory import CATEGORIES, memory_in_bytes
from shardlab.strategies.plan.plan import Plan
from shardlab.train.batches import Batches
from shardlab.train.data import Corpus
from shardlab.train.job import Job, Tracing
from shardlab.train.launch.ranks import backend_of, run_ranks
from shardlab.train.tracing import TracedExecutor

SMALL = GPT(layers=4, hidden_size=192, heads=4, seq_len=96, vocab_size=256)
LARGE = GPT(layers=4, hidden_size=320, heads=4, seq_len=128, vocab_size=256)
LLAMA = Llama(layers=4, hidden_size=256, heads=4, kv_heads=2, seq_len=160, vocab_size=256)
SEQUENCE_PARALLEL = Plan(Mesh(tp=2), sequence_parallel=True)

CASES = [  # strategy, ranks, microbatches, model, sequences of a microbatch, name
    ("single", 1, 4, SMALL, 4),
    ("ddp", 2, 4, SMALL, 4),
    ("ddp", 2, 4, LARGE, 4),
    ("fsdp", 2, 4, SMALL, 4),
    ("fsdp", 2, 4, LARGE, 4),
    ("fsdp", 2, 4, LLAMA, 4),
    ("zero-1", 2, 4, LARGE, 4),
    ("zero-2", 2, 4, LARGE, 4),
    ("zero-3", 2, 4, LLAMA, 4),
    ("tensor-parallel", 2, 2, SMALL, 4),
    ("tensor-parallel", 2, 2, LLAMA, 4),
    (SEQUENCE_PARALLEL, 2, 2, LARGE, 4),
    ("gpipe", 2, 4, SMALL, 4),
    ("1f1b", 2, 4, LARGE, 4),
    ("1f1b", 2, 8, LLAMA, 2),
    ("interleaved-1f1b", 2, 4, LLAMA, 4),
    ("zb-h1", 2, 4, LARGE, 4),
]

BENCH = (
    "collectives --ranks 2 --min 2KB --max 32MB --seconds 1.6 --kinds all_reduce all_gather reduce_scatter send_recv",
    "compute --ranks 2 --batches 1x64 4x64 2x256 --seconds 0.3",
)
"""Options of the two runs of `shardlab bench` that measure the machine."""

STATE = ("parameters", "optimizer")


@dataclass(frozen=True)
class Options:
    """Predict steps from this machine's profile, run them, and compare."""

    profile: Annotated[Path | None, tyro.conf.arg(metavar="FILE", help_behavior_hint="(default: measured first)")] = (
        None
    )
    """A profile that shardlab bench has written."""

    other_machine: bool = False
    """Take a profile from another machine."""

    timed: int = 15
    """Timed steps of each case, of which the median counts."""

    ops: bool = False
    """Show predicted and measured seconds by kind of op, over all cases."""

    markdown: bool = False
    """Print the tables as Markdown."""

    json: bool = False
    """Print JSON alone."""


@dataclass(frozen=True)
class Row:
    """Result of one case: seconds, and bytes of the rank with the largest memory."""

    strategy: str
    model: str
    width: int
    ranks: int
    step: tuple[float, float]
    state: tuple[float, float]
    passing: tuple[float, float]
    ops: dict[str, tuple[float, float]]

    @property
    def memory(self) -> tuple[float, float]:
        predicted, measured = zip(self.state, self.passing, strict=True)
        return sum(predicted), sum(measured)


def bench(folder: Path) -> Profile:
    """Measure the machine."""
    path = folder / "profile.json"
    for words in BENCH:
        command = [sys.executable, "-m", "shardlab", "bench", *words.split(), "--profile", str(path), "--json"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return Profile.read(path)


def trace_rank(rank: int, device: torch.device, job: Job, folder: Path, tracing: Tracing) -> None:
    """Run one rank's part of a training on the default text that ends after the recorded steps."""
    corpus = Corpus.open((), job.model.seq_len)
    batches = Batches(corpus, job.model.seq_len, job.micro_batch_size, job.microbatches, job.seed)
    settings = Settings(job.seed, job.numbers, device)
    executor = Executor(job.checked(), rank, job.cut, batches, settings, backend_of(device.type))
    traced = TracedExecutor(executor, job, folder, tracing)
    for _ in range(tracing.steps):
        traced.step()
    traced.finish()


def run_case(job: Job, cluster: Cluster, folder: Path, timed: int) -> Row:
    """Predict a case and run it."""
    checked = job.checked()
    prices = ClusterPrices(job.cut, job.micro_batch_size, cluster.at_work(job.ranks), PRECISIONS["fp32"])
    predicted = estimate(checked, prices)
    run_ranks(job.ranks, trace_rank, job, folder, Tracing(timed_steps=timed))
    measured = read_trace(folder).measured(checked)
    compared = compare(measured, predicted.timeline())
    rank = max(range(job.ranks), key=lambda rank: sum(measured.live[rank].values()))
    held = memory_in_bytes(checked, counters=True)[rank]
    told = dict(
        zip(
            (each.value for each in CATEGORIES),
            held.at_starts[held.before_ops.index(max(held.before_ops))],
            strict=True,
        )
    )
    ops: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
    for row in compared.kinds:
        before = ops[row.kind.value]
        ops[row.kind.value] = before[0] + (row.seconds.predicted or 0), before[1] + (row.seconds.measured or 0)

    def both(kept: bool) -> tuple[float, float]:
        """Predicted and measured bytes of state that stays between steps, or of all else."""
        predicted, seen = (
            sum(bytes for name, bytes in each.items() if (name in STATE) == kept)
            for each in (told, measured.live[rank])
        )
        return predicted, seen

    step = predicted.step, median(measured.steps)
    model = type(job.model).__name__
    return Row(job.title, model, job.model.hidden_size, job.ranks, step, both(True), both(False), dict(ops))


def error(pair: tuple[float, float]) -> float:
    """Error of a prediction relative to the measurement; above 0, the prediction is too high."""
    return pair[0] / pair[1] - 1


def summary(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Median and worst error."""
    found = {name: [abs(error(getattr(row, name))) for row in rows] for name in ("step", "memory", "state", "passing")}
    return {name: {"median": median(errors), "worst": max(errors)} for name, errors in found.items()}


def show(rows: Sequence[Row], options: Options) -> None:
    """Print a line for each case, the errors of all cases, and optionally seconds by kind of op."""
    console = Console(highlight=False, width=160 if options.markdown else None)

    def table(left: Sequence[str], right: Sequence[str]) -> Table:
        made = Table(box=MARKDOWN if options.markdown else None, padding=(0, 1, 0, 0), header_style="dim")
        for heading in left:
            made.add_column(heading)
        for heading in right:
            made.add_column(heading, justify="right")
        return made

    cases = table(("strategy", "model", "ranks"), ("step, ms", "measured", "error", "memory, MiB", "measured", "error"))
    for row in rows:
        times = [f"{1000 * seconds:,.1f}" for seconds in row.step]
        sizes = [f"{bytes / 2**20:,.2f}" for bytes in row.memory]
        model = f"{row.model} {row.width}"
        cases.add_row(
            row.strategy, model, str(row.ranks), *times, f"{error(row.step):+.1%}", *sizes, f"{error(row.memory):+.2%}"
        )
    errors = table(("error of",), ("median", "worst"))
    words = {"step": "step time", "memory": "peak memory", "state": "- parameters, optimizer", "passing": "- all else"}
    for name, found in summary(rows).items():
        errors.add_row(words[name], f"{found['median']:.2%}", f"{found['worst']:.2%}")
    ops = table(("op",), ("predicted, ms", "measured", "error"))
    for kind in dict.fromkeys(kind for row in rows for kind in row.ops):
        left, right = (sum(row.ops[kind][side] for row in rows if kind in row.ops) for side in (0, 1))
        pair = left, right
        ops.add_row(kind, *(f"{1000 * each:,.1f}" for each in pair), f"{error(pair):+.1%}" if pair[1] else "-")
    for each in (cases, errors, *([ops] if options.ops else [])):
        console.print(each)
        console.print()


def main(options: Options) -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"agreement: the machine is busy (load {load:.1f}); timings will be too long", file=sys.stderr)
    began = time.perf_counter()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shardlab-") as place:
        folder = Path(place)
        here, other = this_machine(), options.other_machine
        profile = (
            Profile.read(options.profile, this_machine=here, other_machine=other) if options.profile else bench(folder)
        )
        for number, (strategy, ranks, microbatches, model, sequences) in enumerate(CASES):
            name = "tp + sp" if isinstance(strategy, Plan) else ""
            job = Job(strategy, ranks, microbatches, model, sequences, name=name)
            print(f"{number + 1}/{len(CASES)} {job.title}", file=sys.stderr)
            rows.append(run_case(job, Cluster.of_profile(profile), folder / str(number), options.timed))
    if options.json:
        cases = [{**asdict(row), "memory": row.memory} for row in rows]
        data = {"machine": asdict(profile.machine), "load": load, "cases": cases, "errors": summary(rows)}
        print(json.dumps(data, indent=2))
    else:
        show(rows, options)
        machine = profile.machine
        print(
            f"{machine.processor}, {machine.places} cores, torch {machine.torch}; {time.perf_counter() - began:.0f} s"
        )
        print(f"a second of communication takes {profile.contention:.2f} s from compute beside it")


if __name__ == "__main__":
    main(tyro.cli(Options))
