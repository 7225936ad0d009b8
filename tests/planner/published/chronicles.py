"""Runs of 384 A100 of 80 GB by bigscience, 20 to 28 February 2022, with the memory that nvidia-smi showed on the first
and the last node, or "OOM": the tables of bigscience-workshop/bigscience, train/tr11-176B-ml/chronicles-prequel.md."""

from __future__ import annotations

from typing import Any

TABLE = (
    # hidden, layers, heads, dp, tp, pp, micro-batch, sequences, GB, bfloat16 with float32 gradients
    (14336, 72, 64, 8, 8, 6, 1, 2048, 38, False),
    (14336, 72, 64, 8, 8, 6, 4, 2048, 56, False),
    (14336, 72, 64, 4, 8, 12, 8, 2048, 69, False),
    (14336, 72, 64, 24, 8, 2, 2, 2016, 76, False),
    (14336, 72, 64, 48, 8, 1, 1, 2016, "OOM", False),
    (14336, 72, 64, 16, 4, 6, 4, 2048, 75, False),
    (14336, 72, 64, 16, 2, 12, 2, 2048, 63, False),
    (14336, 72, 64, 32, 2, 6, 2, 2048, "OOM", False),
    (14336, 72, 64, 32, 2, 6, 1, 2048, "OOM", False),
    (12288, 106, 96, 8, 4, 12, 4, 2048, 79, True),
    (12288, 100, 64, 16, 4, 6, 2, 2048, "OOM", True),
    (12288, 100, 64, 16, 4, 6, 1, 2048, "OOM", True),
    (12288, 100, 64, 8, 8, 6, 4, 2048, 72, True),
    (13312, 82, 64, 8, 4, 12, 4, 2048, 74, True),
    (14336, 70, 64, 4, 8, 12, 2, 2048, 40, True),
)


def row_of(
    hidden: int,
    layers: int,
    heads: int,
    dp: int,
    tp: int,
    pp: int,
    micro_batch: int,
    sequences: int,
    memory: int | str,
    bfloat16: bool,
) -> dict[str, Any]:
    """A row of the table as `shardlab validate` reads it; batches that do not divide lose what is left over."""
    return {
        "id": f"{layers} layers of {hidden}, tp {tp}, pp {pp}, dp {dp}, micro-batch {micro_batch}",
        "source": "bigscience-workshop/bigscience train/tr11-176B-ml/chronicles-prequel.md",
        "framework": "megatron-deepspeed-2022",
        "model": {
            "layers": layers,
            "hidden": hidden,
            "heads": heads,
            "vocab": 250880,
            "seq_len": 2048,
            "tied_embeddings": True,
        },
        "hardware": {"device": "a100-80gb", "gpus": 384, "gpus_per_node": 8, "network": "omni-path-100", "nics": 4},
        "parallelism": {
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "zero_stage": 1,
            "schedule": "1f1b",
            "first_last_stage_one_layer_less": bfloat16,
        },
        "batch": {
            "global_sequences": sequences // (dp * micro_batch) * dp * micro_batch,
            "micro_batch": micro_batch,
        },
        "precision": "bf16" if bfloat16 else "fp16",
        **({"gradients": "fp32"} if bfloat16 else {}),
        "recompute": "full",
        "measured": {"peak_memory_GB_nvidia_smi": memory},
    }


ROWS = [row_of(*entries) for entries in TABLE]
