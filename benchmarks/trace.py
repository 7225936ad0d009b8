"""Measure how fast programs are traced and checked, and how soon a deadlock is reported.

    python benchmarks/trace.py

    python benchmarks/trace.py --against ../another-checkout

Entries are those of the tapes, including WAIT and FREE, as in `ops` of `shardlab simulate --json`. Times are CPU
seconds on one core, and each is the minimum of several repetitions.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.table import Table

from shardlab.check import check
from shardlab.language import Deadlock, Mesh, Rank, Strategy, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan.plan import Plan
from shardlab.strategies.plan.program import program_from_plan

CASES = {  # mesh, layers, microbatches
    "gpipe": (Mesh(pp=64), 64, 256),
    "fsdp": (Mesh(dp_shard=64), 96, 64),
    "ddp": (Mesh(dp_shard=64), 96, 64),
    "pipeline-fsdp": (Mesh(pp=8, dp_shard=8), 64, 64),
}

SHARD = ("dp_shard",)

PLANS = [  # a plan, layers or the blocks of a model whose layers are cut, microbatches
    (Plan(Mesh(dp_shard=16), shard_parameters=SHARD, shard_gradients=SHARD, shard_optimizer=SHARD), 48, 64),
    (Plan(Mesh(pp=8), "interleaved-1f1b", stages_per_rank=4), 64, 128),
    (Plan(Mesh(pp=8), "zb-v"), 64, 128),
    (Plan(Mesh(pp=4, tp=8), "1f1b"), 16, 32),
    (Plan(Mesh(dp_shard=4, tp=4), sequence_parallel=True), 16, 32),
    (Plan(Mesh(cp=8)), 8, 8),
    (Plan(Mesh(cp=4, tp=4)), 8, 16),
    (Plan(Mesh(pp=2, ep=8), "1f1b"), 16, 64),
]


async def last_rank_forgets_a_message(rank: Rank) -> None:
    """A pipeline whose last rank waits for one activation that is never sent."""
    stage = rank.index
    rank.weights[stage], rank.opt_states[stage] = rank.load_weights(stage)
    for m in rank.microbatches:
        if stage == 0:
            rank.activations[0, m] = rank.load_batch([m])
        else:
            rank.activations[stage, m] = await rank.recv(source=stage - 1, expect=("activations", stage, m))
        rank.activations[stage + 1, m] = rank.forward(stage, rank.activations[stage, m], rank.weights[stage])
        if stage < rank.world - 1:
            await rank.send(rank.activations.pop((stage + 1, m)), to=stage + 1)
    if stage == rank.world - 1:
        await rank.recv(source=stage - 1)
    await rank.recv(source=(stage + 1) % rank.world)


@dataclass(frozen=True)
class Options:
    """Time tracing and checking."""

    repeat: int = 5
    """Repetitions of each case."""

    only: tuple[str, ...] = ()
    """Cases that are timed, by name; all without it."""

    against: Path | None = None
    """Another checkout of Shardlab. Both trees alternate, each time in a new process. The medians of the ratios of the
    other tree's times to this one's are shown (above 1: this tree is faster)."""

    json: bool = False
    """Print JSON alone."""


Case = tuple[Strategy, Mesh, int, int]


def named_cases() -> dict[str, Case]:
    cases: dict[str, Case] = {name: (STRATEGIES[name].program, *rest) for name, rest in CASES.items()}
    for plan, layers, microbatches in PLANS:
        axes = " ".join(f"{axis}{size}" for axis, size in plan.mesh.sizes().items() if size > 1)
        cases[f"{plan.schedule} {axes}"] = (program_from_plan(plan), plan.mesh, layers, microbatches)
    return cases


def timed(case: Case, repeat: int) -> dict[str, float]:
    """Minimum CPU seconds of tracing and of checking."""
    tracing: list[float] = []
    checking: list[float] = []
    entries = 0
    for _ in range(repeat):
        start = time.process_time()
        program = trace(*case)
        middle = time.process_time()
        check(program)
        tracing.append(middle - start)
        checking.append(time.process_time() - middle)
        entries = sum(map(len, program.tapes))
    seconds = min(tracing) + min(checking)
    return {
        "entries": entries,
        "trace_s": min(tracing),
        "check_s": min(checking),
        "seconds": seconds,
        "entries_per_s": entries / seconds,
    }


TIMES = """
import json, sys
sys.path.insert(0, sys.argv[1])
from trace import named_cases, timed
print(json.dumps(timed(named_cases()[sys.argv[2]], 3)))
"""


def timed_in(tree: Path, name: str) -> dict[str, float]:
    """Time a case with the code of a tree, in a new process."""
    command = [sys.executable, "-c", TIMES, str(Path(__file__).parent), name]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src")}
    return json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)


def compared(name: str, against: Path, repeat: int) -> dict[str, float]:
    """Median ratios of the other tree's times to this one's."""
    here = Path(__file__).parents[1]
    ratios: dict[str, list[float]] = {"trace": [], "check": [], "both": []}
    entries = 0.0
    for turn in range(repeat):
        trees = (against, here) if turn % 2 else (here, against)
        times = {tree: timed_in(tree, name) for tree in trees}
        for what, key in zip(ratios, ("trace_s", "check_s", "seconds"), strict=True):
            ratios[what].append(times[against][key] / times[here][key])
        entries = times[here]["entries"]
    return {"entries": entries, **{what: statistics.median(each) for what, each in ratios.items()}}


def deadlock_seconds() -> tuple[float, str]:
    """Time until a deadlock is reported, and its report."""
    start = time.process_time()
    try:
        trace(last_rank_forgets_a_message, 64, 64, 256)
    except Deadlock as deadlock:
        return time.process_time() - start, str(deadlock)
    raise AssertionError("the program was meant to hang")


def main(options: Options) -> None:
    cases = {name: case for name, case in named_cases().items() if not options.only or name in options.only}
    if options.against is not None:
        rows = {name: compared(name, options.against.resolve(), options.repeat) for name in cases}
        show({"against": rows}, rows, options.json)
        return
    rows = {name: timed(case, options.repeat) for name, case in cases.items()}
    seconds, report = deadlock_seconds()
    show({"cases": rows, "deadlock": {"deadlock_s": seconds, "report": report}}, rows, options.json)
    if not options.json:
        print(f"a deadlock of 64 ranks and 256 microbatches was reported in {seconds:.2f} s")


def show(found: Mapping[str, object], rows: Mapping[str, Mapping[str, float]], as_json: bool) -> None:
    """Print JSON, or a line for each case."""
    if as_json:
        print(json.dumps(found, indent=2))
        return
    table = Table("case", *dict.fromkeys(name for row in rows.values() for name in row))
    for name, row in rows.items():
        table.add_row(name, *(f"{value:,.2f}" if value < 1000 else f"{value:,.0f}" for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
