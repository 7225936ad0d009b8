"""Measure how long it takes to predict the time and memory of a candidate plan, on one core.

    python benchmarks/forecast.py

    python benchmarks/forecast.py --whole    # simulate every op as well, and compare

Candidates are all meshes of a cluster whose axes are powers of two, with ZeRO 1 and 3, for a few micro-batch sizes. The
first candidate of a list includes work that the others share. Each list starts without it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import tyro
from rich.console import Console
from rich.table import Table

from shardlab.language import UserError
from shardlab.language.precision import find_precision
from shardlab.models import Blocks, Llama, find_model
from shardlab.simulate.hardware import find_cluster
from shardlab.simulate.predict.forecast import forecast
from shardlab.simulate.predict.workload import Workload
from shardlab.strategies.plan.plan import Plan

SMALL: dict[str, Any] = {"vocab_size": 131072, "seq_len": 4096, "tied": True}
MODELS: dict[str, Blocks] = {
    "1.34B": Llama(layers=16, hidden_size=2048, heads=32, kv_heads=32, ffn_hidden_size=8192, **SMALL),
    "8.86B": Llama(layers=32, hidden_size=4096, heads=32, kv_heads=32, ffn_hidden_size=16384, **SMALL),
    "70B": find_model("llama3-70b"),
    "405B": find_model("llama3-405b"),
}

LISTS = [  # model, cluster, sequences of a step, of a microbatch, tensor- and pipeline-parallel ranks
    ("1.34B", "h100x64", 256, (1, 4, 16), (1, 2, 4, 8), (1, 2, 4, 8, 16)),
    ("8.86B", "h100x256", 256, (1, 2, 4), (1, 2, 4, 8), (1, 2, 4, 8, 16)),
    ("70B", "h100x512", 1024, (1, 2), (1, 4, 8), (1, 2, 4, 8, 16)),
    ("405B", "h100x16384", 2048, (1,), (8,), (8, 16)),
]

SHOWN = ("mean_ms", "median_ms", "p90_ms", "p99_ms", "worst_ms")

ZERO = {1: ("shard_optimizer",), 3: ("shard_optimizer", "shard_gradients", "shard_parameters")}


@dataclass(frozen=True)
class Options:
    """Time the pricing of plans."""

    json: bool = False
    """Print JSON alone."""

    whole: bool = False
    """Replay every op of every candidate as well: minutes."""


def candidates(
    name: str, cluster: str, sequences: int, sizes: tuple[int, ...], tps: tuple[int, ...], pps: tuple[int, ...]
) -> Iterator[Workload]:
    """List the plans that divide."""
    devices = find_cluster(cluster)
    for micro_batch_size, tp, pp, (stage, shards) in product(sizes, tps, pps, ZERO.items()):
        ranks = devices.size // (tp * pp)
        microbatches, rest = divmod(sequences, micro_batch_size)
        if rest or not ranks or microbatches % ranks or (stage == 3 and MODELS[name].has_tied_head):
            continue
        words = {"mesh": {"pp": pp, "dp_shard": ranks, "tp": tp}, "sequence_parallel": tp > 1}
        plan = Plan.from_dict(words | dict.fromkeys(shards, ("dp_shard",)))
        yield Workload(plan, MODELS[name], devices, microbatches, micro_batch_size, find_precision("bf16"))


def main(options: Options) -> None:
    rows: list[dict[str, object]] = []
    for name, cluster, *rest in LISTS:
        seconds: list[float] = []
        apart = 0.0
        for workload in candidates(name, cluster, *rest):  # pyright: ignore[reportArgumentType]
            start = time.process_time()
            try:
                made = forecast(workload)
            except UserError:
                continue
            seconds.append(time.process_time() - start)
            if options.whole:
                apart = max(apart, abs(made.seconds / replace(workload).estimate().step - 1))
        seconds.sort()
        at = [seconds[min(len(seconds) - 1, int(share * len(seconds)))] for share in (0.5, 0.9, 0.99)]
        figures = [sum(seconds) / len(seconds), *at, seconds[-1]]
        row: dict[str, object] = {"model": name, "cluster": cluster, "plans": len(seconds)}
        row |= {name: 1e3 * value for name, value in zip(SHOWN, figures, strict=True)}
        rows.append(row | ({"apart": apart} if options.whole else {}))
    if options.json:
        print(json.dumps({"lists": rows}, indent=2))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:,.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Options))
