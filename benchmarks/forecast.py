"""Measure how long it takes to predict the time and memory of a candidate plan, on one core.

    python benchmarks/forecast.py

    python benchmarks/forecast.py --whole    # simulate every op as well, and compare

    python benchmarks/forecast.py --search   # plans of llama3-70b, each after a like one

Candidates are all meshes of a cluster whose axes are powers of two, with ZeRO 1 and 3, for a few micro-batch sizes. The
first candidate of a list includes work that the others share. Each list starts without it. In a search, most plans
follow others that share their samples, so --search times the best of three forecasts after a first one.
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
from shardlab.simulate.predict.recipe import recipes
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

PLANS: dict[str, tuple[dict[str, Any], int]] = {  # plan, microbatches of each data-parallel rank
    "1f1b, pp 8, tp 8": ({"mesh": {"pp": 8, "dp_shard": 4, "tp": 8}, "shard_optimizer": ("dp_shard",)}, 32),
    "interleaved, pp 4 x 5, tp 8": (
        {
            "mesh": {"pp": 4, "dp_shard": 8, "tp": 8},
            "schedule": "interleaved-1f1b",
            "stages_per_rank": 5,
            "shard_optimizer": ("dp_shard",),
        },
        32,
    ),
    "ZeRO-3": ({"mesh": {"dp_shard": 256}} | dict.fromkeys(ZERO[3], ("dp_shard",)), 4),
    "ZeRO-3, tp 8": ({"mesh": {"dp_shard": 32, "tp": 8}} | dict.fromkeys(ZERO[3], ("dp_shard",)), 16),
    "ring, cp 4, tp 8": ({"mesh": {"dp_shard": 8, "cp": 4, "tp": 8}, "shard_optimizer": ("dp_shard",)}, 8),
    "gpipe, pp 8, tp 8": (
        {"mesh": {"pp": 8, "dp_shard": 4, "tp": 8}, "schedule": "gpipe", "shard_optimizer": ("dp_shard",)},
        64,
    ),
}


@dataclass(frozen=True)
class Options:
    """Time the pricing of plans."""

    json: bool = False
    """Print JSON alone."""

    whole: bool = False
    """Replay every op of every candidate as well: minutes."""

    search: bool = False
    """Time plans of llama3-70b, 80 identical blocks on 256 devices, in the order of a search."""


def candidates(
    name: str, cluster: str, sequences: int, sizes: tuple[int, ...], tps: tuple[int, ...], pps: tuple[int, ...]
) -> Iterator[Workload]:
    """List the candidates whose mesh divides the model."""
    devices = find_cluster(cluster)
    for micro_batch_size, tp, pp, (stage, shards) in product(sizes, tps, pps, ZERO.items()):
        ranks = devices.size // (tp * pp)
        microbatches, rest = divmod(sequences, micro_batch_size)
        if rest or not ranks or microbatches % ranks or (stage == 3 and MODELS[name].has_tied_head):
            continue
        words = {"mesh": {"pp": pp, "dp_shard": ranks, "tp": tp}, "sequence_parallel": tp > 1}
        plan = Plan.from_dict(words | dict.fromkeys(shards, ("dp_shard",)))
        yield Workload(plan, MODELS[name], devices, microbatches, micro_batch_size, find_precision("bf16"))


def searched() -> list[dict[str, object]]:
    """Return for each plan and recipe the milliseconds of a forecast that follows a similar one."""
    devices, rows = find_cluster("h100x256"), list[dict[str, object]]()
    for name, (words, each) in PLANS.items():
        row: dict[str, object] = {"plan": name}
        for recipe in ("torchtitan", "megatron-core-tuned"):
            plan = Plan.from_dict(words | {"sequence_parallel": "tp" in words["mesh"]})
            count = plan.data_ranks * each
            seconds: list[float] = []
            for _ in range(4):
                workload = Workload(
                    plan, MODELS["70B"], devices, count, 1, find_precision("bf16"), recipe=recipes()[recipe]
                )
                start = time.process_time()
                forecast(workload)
                seconds.append(time.process_time() - start)
            row[f"{recipe} ms"] = 1e3 * min(seconds[1:])
        rows.append(row)
    return rows


def main(options: Options) -> None:
    rows = searched() if options.search else measured(options)
    if options.json:
        print(json.dumps({"lists": rows}, indent=2))
        return
    table = Table(*rows[0])
    for row in rows:
        table.add_row(*(f"{value:,.3g}" if isinstance(value, float) else str(value) for value in row.values()))
    Console().print(table)


def measured(options: Options) -> list[dict[str, object]]:
    """Return the times of the forecasts for each list of candidates."""
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
    return rows


if __name__ == "__main__":
    main(tyro.cli(Options))
