"""How fast programs are traced and checked, and how soon a deadlock is reported.

    python benchmarks/trace.py

Entries are those of the tapes, WAIT and FREE included, as in `ops` of `shardlab simulate --json`. The time is that of
tracing and of all checks together, in one process on one core, the median of several repetitions.
"""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table

from shardlab.check import check
from shardlab.program import Deadlock, Mesh, Rank, trace
from shardlab.strategies import STRATEGIES
from shardlab.strategies.plan import Plan
from shardlab.strategies.planned import planned

CASES = [  # strategy, ranks, layers, microbatches
    ("gpipe", 64, 64, 256),
    ("fsdp", 64, 96, 64),
    ("ddp", 64, 96, 64),
    ("pipeline-fsdp", 64, 64, 64),
]

SLICED = [  # a plan whose layers are cut, the model's blocks, microbatches
    (Plan(Mesh(pp=4, tp=8), "1f1b"), 16, 32),
    (Plan(Mesh(dp_shard=4, tp=4), sequence_parallel=True), 16, 32),
    (Plan(Mesh(cp=8)), 8, 8),
    (Plan(Mesh(pp=2, ep=8), "1f1b"), 16, 64),
]


async def last_rank_forgets_a_message(rank: Rank) -> None:
    """A pipeline whose last rank waits for one more activation than is ever sent to it."""
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

    json: bool = False
    """Print JSON alone."""


def main(options: Options) -> None:
    rows: list[dict[str, object]] = []
    cases = [(n, STRATEGIES[n].program, STRATEGIES[n].grid(ranks), l, m) for n, ranks, l, m in CASES]
    for plan, blocks, microbatches in SLICED:
        axes = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.sizes().items() if size > 1)
        cases.append((axes, planned(plan), plan.mesh, blocks, microbatches))
    for name, program_of, mesh, layers, microbatches in cases:
        tracing: list[float] = []
        checking: list[float] = []
        entries = 0
        for _ in range(options.repeat):
            start = time.perf_counter()
            program = trace(program_of, mesh, layers, microbatches)
            middle = time.perf_counter()
            check(program)
            tracing.append(middle - start)
            checking.append(time.perf_counter() - middle)
            entries = sum(map(len, program.tapes))
        seconds = statistics.median(a + b for a, b in zip(tracing, checking, strict=True))
        rows.append(
            {
                "strategy": name,
                "ranks": mesh.world,
                "layers": layers,
                "microbatches": microbatches,
                "entries": entries,
                "trace_s": statistics.median(tracing),
                "check_s": statistics.median(checking),
                "entries_per_s": entries / seconds,
            }
        )
    start = time.perf_counter()
    try:
        trace(last_rank_forgets_a_message, 64, 64, 256)
    except Deadlock as deadlock:
        report = {"deadlock_s": time.perf_counter() - start, "report": str(deadlock)}
    else:
        raise AssertionError("the program was meant to hang")
    if options.json:
        print(json.dumps({"cases": rows, "deadlock": report}, indent=2))
        return
    table = Table("strategy", "ranks", "layers", "microbatches", "entries", "trace s", "check s", "entries/s")
    for row in rows:
        table.add_row(
            *(
                f"{v:,.2f}" if isinstance(v, float) and v < 1000 else f"{v:,.0f}" if isinstance(v, float) else str(v)
                for v in row.values()
            )
        )
    console = Console()
    console.print(table)
    console.print(f"a deadlock of 64 ranks and 256 microbatches was reported in {report['deadlock_s']:.2f} s")


if __name__ == "__main__":
    main(tyro.cli(Options))
