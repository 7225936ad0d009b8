"""Rows of a file of runs of nanotron, as `shardlab plan --grade` takes them."""

from __future__ import annotations

from typing import Any


def row(
    *, dp: int = 1, tp: int = 1, pp: int = 1, micro_batch: int = 1, speed: float | None = 1000.0, zero: int = 0
) -> dict[str, Any]:
    """One run of a model of 16 blocks on as many H100 as its ranks."""
    gpus = dp * tp * pp
    return {
        "id": "playbook-small",
        "source": "HF ultra-scale playbook (nanotron)",
        "framework": "nanotron",
        "model": {
            "name": "small",
            "layers": 16,
            "hidden": 2048,
            "heads": 32,
            "ffn_hidden": 8192,
            "ffn_type": "swiglu",
            "vocab": 131072,
            "seq_len": 4096,
            "tied_embeddings": True,
        },
        "hardware": {"gpu": "H100-SXM5-80GB", "gpus": gpus, "gpus_per_node": 8, "interconnect": "NVLink; EFA"},
        "parallelism": {"tp": tp, "pp": pp, "dp": dp, "zero_stage": zero, "sequence_parallel": tp > 1},
        "batch": {"global_sequences": 256, "micro_batch": micro_batch},
        "precision": "bf16 mixed, fp32 grad accumulation",
        "measured": {} if speed is None else {"tokens_per_s_per_gpu": speed, "peak_memory_GiB": 20.0},
    }
