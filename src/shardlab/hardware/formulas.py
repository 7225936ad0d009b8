"""Formulas of the sources, as they write them, so that their figures can be compared with ours."""

from __future__ import annotations

from typing import Literal

GIB = 2.0**30


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Size over time (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Algorithm bandwidth"), in bytes/s.

    The size is that of the whole value: the tensor that is reduced, the gathered result, the input that is scattered.
    """
    return bytes / seconds


def bus_factor(kind: str, ranks: int) -> float:
    """What makes algorithm bandwidth comparable to a link's (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Summary").

    All_reduce 2(n - 1)/n; reduce_scatter, all_gather and all_to_all (n - 1)/n; broadcast and reduce 1. Gather and
    scatter, which that page leaves out, are (n - 1)/n in nccl-tests' own code (src/gather.cu, src/scatter.cu), and a
    message is 1 (src/sendrecv.cu).
    """
    if kind in ("broadcast", "reduce", "send_recv"):
        return 1.0
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks


def bus_bandwidth(kind: str, bytes: float, ranks: int, seconds: float) -> float:
    """Algorithm bandwidth times the collective's factor, in bytes/s: what each rank's link carried."""
    return algorithm_bandwidth(bytes, seconds) * bus_factor(kind, ranks)


def cs336_all_reduce(elements: int, ranks: int, seconds: float, element_bytes: int = 4) -> float:
    """CS336's bandwidth of an all_reduce, which it prints as "GB/s", in 2^30 bytes/s (spring 2025, lecture_08.py).

    It says: bytes of the tensor times 2 (n - 1), over n times the duration. That is bus bandwidth.
    """
    return elements * element_bytes * 2 * (ranks - 1) / (ranks * seconds) / GIB


def cs336_reduce_scatter(elements: int, ranks: int, seconds: float, element_bytes: int = 4) -> float:
    """CS336's bandwidth of a reduce_scatter, in 2^30 bytes/s (spring 2025, lecture_08.py).

    Every rank's input is n x elements. It says: bytes of the OUTPUT times (n - 1), over n times the duration. Bus
    bandwidth counts the whole input, which is n times as much; so this is bus bandwidth over n.
    """
    return elements * element_bytes * (ranks - 1) / (ranks * seconds) / GIB


def nanogpt_flops_per_token(parameters: int, layers: int, heads: int, head_width: int, block: int) -> float:
    """FLOPs of a token, forward and backward: 6N + 12LHQT (nanoGPT model.py, estimate_mfu, after PaLM's appendix B).

    N leaves out the position embedding; attention is counted as if it were not causal.
    """
    return 6.0 * parameters + 12.0 * layers * heads * head_width * block


def nanogpt_mfu(flops_per_token: float, tokens_per_second: float, peak: float = 312e12) -> float:
    """Share of the peak FLOP/s, by default an A100's in bfloat16 (nanoGPT model.py, estimate_mfu)."""
    return flops_per_token * tokens_per_second / peak


def zero_bytes(parameters: float, ranks: int, stage: Literal[0, 1, 2, 3], optimizer: float = 12.0) -> float:
    """Model state of one rank in bytes (Rajbhandari et al. 2019, arXiv 1910.02054, figure 1).

    2 bytes of each parameter, 2 of its gradient, 12 of its optimizer state (fp32 copy, momentum, variance); stage 1
    shards the last, stage 2 the gradients too, stage 3 all.
    """
    shards = [ranks if stage >= at else 1 for at in (3, 2, 1)]
    return parameters * sum(bytes / shard for bytes, shard in zip((2.0, 2.0, optimizer), shards, strict=True))
