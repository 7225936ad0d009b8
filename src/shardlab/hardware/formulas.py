"""Formulas of the sources, as they write them, so that their figures can be compared with ours."""

from __future__ import annotations

GIB = 2.0**30


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """Size over time (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Algorithm bandwidth"), in bytes/s.

    The size is that of the whole value: the tensor that is reduced, the gathered result, the input that is scattered.
    """
    return bytes / seconds


def bus_factor(kind: str, ranks: int) -> float:
    """Factor that makes algorithm bandwidth comparable to a link's (NVIDIA/nccl-tests doc/PERFORMANCE.md, "Summary").

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


def cs336_bandwidth(kind: str, bytes: float, ranks: int, seconds: float) -> float | None:
    """Bandwidth that CS336 (lecture 8, spring 2025) prints as "GB/s", in 2^30 bytes/s (None: it does not measure it).

    Of an all_reduce: bytes of the tensor times 2 (n - 1), over n times the duration; that is bus bandwidth. Of a
    reduce_scatter: bytes of the OUTPUT times (n - 1), over n times the duration. Bus bandwidth counts the whole input,
    which is n times as much, so that is bus bandwidth over n.

    Args:
        bytes: of the whole value, as everywhere here: of a reduce_scatter one rank's input.
    """
    if kind not in ("all_reduce", "reduce_scatter"):
        return None
    return bus_bandwidth(kind, bytes, ranks, seconds) / (ranks if kind == "reduce_scatter" else 1) / GIB
