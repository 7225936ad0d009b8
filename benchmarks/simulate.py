"""Measure how fast a step of many ranks is simulated: traced with identical ranks folded, then clocks and memory.

    python benchmarks/simulate.py

Ops are the entries of the traced tapes, including WAIT and FREE. Everything runs in one process on one core. `seconds`
is the CPU time from the plan to the figures of the step, and `ops_per_s` is the speed of the clocks and the memory.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table

from shardlab.language import Mesh
from shardlab.language.precision import find_precision
from shardlab.language.world import gc_paused
from shardlab.models import find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.estimate import estimate
from shardlab.simulate.predict.prices import ClusterPrices
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

SHARD = ("dp_shard",)

CASES = [  # model, cluster, plan, microbatches of each pipeline
    ("llama3-70b", "h100x64", Plan(Mesh(pp=4, dp_shard=2, tp=8), sequence_parallel=True, shard_optimizer=SHARD), 32),
    (
        "llama3-405b",  # its 126 layers
        "h100x16384",
        Plan(Mesh(pp=16, dp_shard=128, tp=8), sequence_parallel=True, shard_optimizer=SHARD),
        128,
    ),
]


@dataclass(frozen=True)
class Options:
    """Time simulation."""

    json: bool = False
    """Print JSON alone."""


def main(options: Options) -> None:
    rows: list[dict[str, object]] = []
    for model, cluster, plan, microbatches in CASES:
        start, began = time.process_time(), time.perf_counter()
        sequences = microbatches * plan.data_ranks
        with gc_paused():  # as `Workload.estimate` does
            workload = Workload(plan, find_model(model), find_cluster(cluster), sequences, 1, find_precision("bf16"))
            traced = workload.traced
            middle = time.process_time()
            step = estimate(
                traced, ClusterPrices(workload.cut, workload.micro_batch_size, workload.cluster, workload.precision)
            )
            replayed = time.process_time()
        figures = step.step, step.exposed_share, step.idle_share, step.peak
        end = time.process_time()
        ops = sum(map(len, traced.program.tapes))
        rows.append(
            {
                "model": model,
                "cluster": cluster,
                "layers": workload.model.layers,
                "microbatches": microbatches,
                "ops": ops,
                "trace_s": middle - start,
                "simulate_s": replayed - middle,
                "seconds": end - start,
                "wall_s": time.perf_counter() - began,
                "ops_per_s": ops / (replayed - middle),
                "step_s": figures[0],
            }
        )
    if options.json:
        print(json.dumps({"cases": rows}, indent=2))
        return
    shown = ("cluster", "layers", "microbatches", "ops", "trace_s", "simulate_s", "seconds", "ops_per_s")
    table = Table(*shown)
    for row in rows:
        values = (row[name] for name in shown)
        table.add_row(*(f"{value:,.4g}" if isinstance(value, float) else str(value) for value in values))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
