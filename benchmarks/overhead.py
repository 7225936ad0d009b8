"""Measure the overhead of the executor in microseconds an op, on a model that hardly computes.

    python benchmarks/overhead.py

    python benchmarks/overhead.py --against ../another-checkout

Ops are those of rank 0's tape, including WAIT and FREE. Times are CPU times of rank 0's thread, so that waiting for
other ranks does not count. Each is the minimum over all steps. Steps of the executor alternate with steps of plain
PyTorch, which has the same passes and the same fused AdamW but no communication. `overhead` is the difference over the
number of ops. For each strategy follow the parts of a step beside those of plain PyTorch, the kinds of op, and the
functions with the largest own time in a profile. The clocks are part of these steps.
"""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import cProfile
import json
import os
import pstats
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.table import Table
from torch import Tensor

from shardlab.execute.executor import Executor
from shardlab.execute.optimizers.settings import OptimizerConfig
from shardlab.execute.settings import Settings
from shardlab.models import GPT
from shardlab.strategies.load import load
from shardlab.train.job import Job
from shardlab.train.launch.ranks import run_ranks

CASES = {"ddp": 2, "zero-1": 2, "zero-3": 2, "tensor-parallel": 1, "1f1b": 8, "zb-v": 8}
"""Microbatches of a step, by strategy; on two ranks."""

MODEL = GPT(layers=8, hidden_size=8, heads=2, vocab_size=16, seq_len=4)
SEQUENCES = 8
PARTS = {
    "forward": ("forward", "recompute"),
    "loss and backward": ("loss", "loss_stats", "backward", "backward_input", "backward_weight"),
    "update": ("norm", "update"),
    "communication": ("all_gather", "all_reduce", "reduce_scatter", "send", "recv", "wait"),
}
"""Kinds of op by part of a step; plain PyTorch has the first three."""

MICRO = 1e-6
WARM_UP = 5

HERE = Path(__file__).parents[1]


@dataclass(frozen=True)
class Options:
    """Time the overhead of the executor."""

    turns: int = 100
    """Steps that are timed, of each kind."""

    only: tuple[str, ...] = ()
    """Strategies that are timed: ddp, zero-1, zero-3, tensor-parallel, 1f1b, zb-v; all without it."""

    functions: int = 8
    """Functions that are listed for each strategy."""

    against: Path | None = None
    """Another checkout of Shardlab. Both trees alternate, each time in new processes. The medians of the ratios of this
    tree's overhead to the other's are shown (0.5: half of it)."""

    repeat: int = 5
    """Turns of both trees."""

    plain: bool = True
    """Time plain PyTorch as well; an older checkout has none."""

    json: bool = False
    """Print JSON alone."""


class SameBatch:
    """One microbatch, repeated, so that data costs nothing."""

    def __init__(self, rows: int) -> None:
        self.micro_batch_size = rows
        self._tokens = torch.arange(rows * MODEL.seq_len).view(rows, -1) % MODEL.vocab_size

    def microbatch(self, step: int, microbatch: int, /) -> tuple[Tensor, Tensor]:
        return self._tokens, self._tokens

    def counted(self, step: int, microbatches: int, /) -> int:
        return microbatches * self._tokens.numel()


def on_a_rank(rank: int, device: torch.device, name: str, options: Options) -> dict[str, Any]:
    """Seconds of a strategy's step on this rank."""
    ranks = dist.get_world_size()
    rows = SEQUENCES // CASES[name]
    job = Job(load(name).for_job(ranks), ranks, CASES[name], MODEL, rows)
    config = OptimizerConfig(learning_rate_schedule="constant", warmup_steps=0)
    executor = Executor(job.checked(), rank, job.cut, SameBatch(rows), Settings(optimizer=config))
    steps: dict[str, Callable[[], Any]] = {"step": executor.step}
    floor = plain(name, ranks, rank, device) if options.plain else None
    if floor is not None:
        steps["plain"] = floor.step
    seconds: dict[str, list[float]] = {each: [] for each in steps}
    for _ in range(WARM_UP + options.turns):
        for each, step in steps.items():
            dist.barrier()
            began = time.thread_time()
            step()
            seconds[each].append(time.thread_time() - began)
    found: dict[str, Any] = {each: min(times[WARM_UP:]) for each, times in seconds.items()}
    found["ops"] = len(executor.instructions)
    found["kinds"] = seconds_by_kind(executor, options.turns)
    found["functions"] = busiest(executor, options.turns, options.functions)
    if floor is not None:
        found["plain_parts"] = seconds_of_plain(floor, options.turns, found["plain"])
    return found


def plain(name: str, ranks: int, rank: int, device: torch.device) -> Any:
    """A rank's share of the step in plain PyTorch."""
    from shardlab.measure.side_by_side.results import PAIRS, Size
    from shardlab.measure.side_by_side.sides import lower_bound_of

    return lower_bound_of(PAIRS[name], Size("tiny", MODEL, SEQUENCES), ranks, rank, device)


def seconds_of_plain(floor: Any, turns: int, whole: float) -> dict[str, float]:
    """Seconds of the parts of a plain step."""
    took: dict[str, float] = defaultdict(float)
    least: dict[str, float] = defaultdict(lambda: float("inf"))

    def timed(part: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def timing(*arguments: Any) -> Any:
            began = time.thread_time()
            made = run(*arguments)
            took[part] += time.thread_time() - began
            return made

        return timing

    for module in floor.modules:
        module.forward = timed("forward", module.forward)
    floor.optimizer.step = timed("update", floor.optimizer.step)
    for _ in range(turns):
        took.clear()
        floor.step()
        for part in ("forward", "update"):
            least[part] = min(least[part], took[part])
    return {**least, "loss and backward": whole - sum(least.values())}


def seconds_by_kind(executor: Executor, turns: int) -> dict[str, dict[str, float]]:
    """Number of ops and their total seconds by kind of op, in the fastest step.

    The time between ops, the clock included, is a further kind, "between ops", with 0 ops.
    """
    tape, plain = executor.state.tape, executor.instructions
    took: list[float] = []

    def timed(instruction: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            began = time.thread_time()
            instruction()
            took.append(time.thread_time() - began)

        return run

    def one_step() -> tuple[float, list[float]]:
        took.clear()
        began = time.thread_time()
        executor.step()
        return time.thread_time() - began, took.copy()

    executor.instructions = [timed(instruction) for instruction in plain]
    whole, ops = min(one_step() for _ in range(turns))
    executor.instructions = plain
    kinds: dict[str, dict[str, float]] = defaultdict(lambda: {"ops": 0, "seconds": 0.0})
    for op, seconds in zip(tape, ops, strict=True):
        kinds[op.kind.value]["ops"] += 1
        kinds[op.kind.value]["seconds"] += seconds
    kinds["between ops"]["seconds"] = whole - sum(ops)
    return dict(sorted(kinds.items(), key=lambda item: -item[1]["seconds"]))


def busiest(executor: Executor, turns: int, count: int) -> list[dict[str, Any]]:
    """The functions with the largest self time (without their callees), in seconds of a step."""
    profile = cProfile.Profile(time.thread_time)
    with profile:
        for _ in range(turns):
            executor.step()
    rows: list[dict[str, Any]] = []
    stats: dict[Any, Any] = vars(pstats.Stats(profile))["stats"]
    for (file, line, function), (_, calls, own, *_) in stats.items():
        where = f"{Path(file).stem}:{line} {function}" if line else function
        rows.append({"function": where, "calls": calls / turns, "seconds": own / turns})
    return sorted(rows, key=lambda row: -row["seconds"])[:count]


def figures(found: dict[str, Any]) -> dict[str, float]:
    """Microseconds per op, and plain PyTorch's share of them."""
    ops = found["ops"]
    return {
        "ops": ops,
        "step_us": found["step"] / MICRO,
        "us_an_op": found["step"] / ops / MICRO,
        "plain_us": found["plain"] / MICRO,
        "overhead_us_an_op": (found["step"] - found["plain"]) / ops / MICRO,
    }


def parts_of(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Microseconds of a step's parts, those of plain PyTorch, and the difference divided by the ops of the step."""
    kinds = {kind: row["seconds"] for kind, row in found["kinds"].items()}
    seconds = {part: sum(kinds.pop(kind, 0.0) for kind in of_part) for part, of_part in PARTS.items()}
    between = kinds.pop("between ops")
    seconds |= {"other ops": sum(kinds.values()), "between ops": between}
    rows: dict[str, dict[str, float]] = {}
    for part, ours in seconds.items():
        plain = found["plain_parts"].get(part, 0.0)
        own = (ours - plain) / found["ops"]
        rows[part] = {"us": ours / MICRO, "plain_us": plain / MICRO, "overhead_us_an_op": own / MICRO}
    return rows


def measured_in(tree: Path, name: str, options: Options) -> dict[str, Any]:
    """Measure one strategy with the code of a tree, in new processes."""
    words = ["--only", name, "--turns", str(options.turns), "--functions", "0", "--json"]
    words += [] if tree == HERE else ["--no-plain"]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    command = [sys.executable, __file__, *words]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout)[name]


def compared(name: str, against: Path, options: Options) -> dict[str, float]:
    """Medians over turns of both trees' overhead per op, and of the ratio of this tree's to the other's."""
    mine: list[float] = []
    theirs: list[float] = []
    steps: list[float] = []
    for turn in range(options.repeat):
        found = {tree: measured_in(tree, name, options) for tree in ((HERE, against) if turn % 2 else (against, HERE))}
        plain = found[HERE]["plain"]
        for tree, overheads in ((HERE, mine), (against, theirs)):
            overheads.append((found[tree]["step"] - plain) / found[tree]["ops"] / MICRO)
        steps.append(found[HERE]["step"] / found[against]["step"])
    ratios = [here / there for here, there in zip(mine, theirs, strict=True)]
    return {"overhead_us": median(mine), "against_us": median(theirs), "ratio": median(ratios), "step": median(steps)}


def main(options: Options) -> None:
    names = [name for name in CASES if not options.only or name in options.only]
    if options.against is not None:
        against = options.against.resolve()
        show_table("strategy", {name: compared(name, against, options) for name in names}, options.json)
        return
    found = {name: run_ranks(2, on_a_rank, name, options) for name in names}
    if options.json:
        print(json.dumps(found, indent=2))
        return
    if options.plain:
        show_table("strategy", {name: figures(each) for name, each in found.items()}, False)
    for name, each in found.items():
        if options.plain:
            print()
            show_table(f"{name}: part", parts_of(each), False)
        rows = [(kind, row["ops"], row["seconds"]) for kind, row in each["kinds"].items()]
        show_rows(name, "op", rows, each["step"])
        if options.functions:
            show_rows(name, "function", [tuple(row.values()) for row in each["functions"]], each["step"])


def show_table(heading: str, rows: dict[str, dict[str, float]], as_json: bool) -> None:
    """Print JSON, or a line for each row."""
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table(heading, *next(iter(rows.values())), box=None, header_style="dim")
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in row.values()))
    Console(highlight=False).print(table)


def show_rows(name: str, what: str, rows: list[tuple[Any, ...]], step: float) -> None:
    """Print the parts of a step's time: calls per step, microseconds per call, and share of a plain step."""
    table = Table(f"{name}: {what}", "in a step", "us each", "us", "of the step", box=None, header_style="dim")
    for label, calls, seconds in rows:
        each = (
            f"{calls:,.0f}",
            f"{seconds / calls / MICRO:,.1f}" if calls else "-",
            f"{seconds / MICRO:,.0f}",
            f"{seconds / step:.0%}",
        )
        table.add_row(str(label), *each)
    Console(highlight=False).print("", table)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
