"""What a collective's time says about the links: nccl-tests' algorithm and bus bandwidth.

Sizes are of the whole value: of an all_gather's and a gather's result, of a reduce_scatter's, a scatter's and
one rank's all_to_all input. Source: github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md ("Summary"), and for gather
and scatter `GatherGetBw` and `ScatterGetBw` in src/gather.cu and src/scatter.cu, for messages src/sendrecv.cu.
"""

from __future__ import annotations

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
    "send_recv",
)
"""What is measured. A barrier has no size; send_recv is one message, half of a ping-pong between two ranks."""


def bus_factor(kind: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return (ranks - 1) / ranks
    assert kind in KINDS, f"no factor is known for {kind}"
    return 1.0
