"""Figures of a step: what each rank saw of it, and the line of metrics.jsonl that follows."""

# pyright: reportUnknownMemberType=false
# torch leaves some of its annotations out.

from __future__ import annotations

import math
import resource
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardlab.data import Corpus
from shardlab.models import Blocks
from shardlab.models.counts import count_parameters

SPREAD = ("dt", "dtf", "dtb", "memory")
"""Figures of which the mean, the least and the most over the ranks are told; docs/training.md defines them."""

READ = 100_000
"""Tokens that are decoded to see how long they are."""


def memory_of(device: torch.device) -> int:
    """The most bytes so far: that torch has taken on a GPU, or that this process has had in memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def spreads(ranks: Tensor) -> dict[str, float]:
    """Mean, least and most over the ranks of (figures, ranks) in the order of SPREAD."""
    return {
        name + suffix: float(figure)
        for name, row in zip(SPREAD, ranks, strict=True)
        for suffix, figure in (("", row.mean()), ("_min", row.min()), ("_max", row.max()))
    }


def speeds(model: Blocks, sequences: int, dt: float, ranks: int, peak: float | None) -> dict[str, Any]:
    """Sequences and tokens per second, of all ranks and of each, and the model FLOPs utilization.

    A utilization above 1 says that the peak is none, so that it is not known either.

    Args:
        model: what is trained.
        sequences: of the global batch.
        dt: seconds of a step.
        ranks: how many share them.
        peak: FLOP/s of all devices together, if that is known.
    """
    sps = sequences / dt
    tps = sps * model.seq_len
    mfu = None if peak is None else flops_per_token(model) * tps / peak
    return {
        "sps": sps,
        "sps_per_gpu": sps / ranks,
        "tps": tps,
        "tps_per_gpu": tps / ranks,
        "mfu": None if mfu is None or mfu > 1 else mfu,
    }


def flops_per_token(model: Blocks) -> float:
    """6 N + 12 L H Q T: nanoGPT's formula (`estimate_mfu`), after Chowdhery et al. 2022, arXiv 2204.02311, appendix B.

    N is the number of parameters without position embeddings, and of experts those that a token is sent to; L layers
    have H heads of Q features each, and attend to T tokens.
    """
    top_k, experts = getattr(model, "top_k", 1), getattr(model, "experts", 1)
    routed = sum(
        each.numel
        for layer in range(model.layers)
        for each in model.layout(layer).parameters
        if ".experts." in each.name
    )
    parameters = count_parameters(model).without_positions - routed * (1 - top_k / experts)
    width = model.hidden_size if getattr(model, "heads", 0) else 0
    return 6.0 * parameters + 12.0 * model.layers * width * model.seq_len


def bytes_per_token(corpus: Corpus) -> float:
    """Bytes of text that a token stands for, on average over the first of the validation text."""
    tokens = np.asarray(corpus.validation.runs[0].tokens[:READ])
    return max(1, corpus.tokenizer.count_bytes(tokens)) / len(tokens)


def bits_per_byte(loss: float, bytes_per_token: float) -> float:
    """A loss in nats per token, in bits per byte of text."""
    return loss / math.log(2) / bytes_per_token
