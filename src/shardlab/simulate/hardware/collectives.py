"""Durations of collectives by algorithm, for a group of ranks on one or more nodes.

Costs are latency and bandwidth (alpha and beta) as in Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH" (cited without access to the paper). The fastest algorithm is taken, as NCCL does
from its own model (NVIDIA/nccl src/graph/tuning.cc). A ring visits the nodes one after another, so it enters and leaves
each once, and its speed is that of its slowest link. A hierarchy works inside every node first, then between nodes with
all members in parallel. If the network's overhead of a step is known (`net_step`), every step of a ring or a tree over
several nodes takes at least that long, also inside nodes, as in tuning.cc ("inter-node rings still have to launch
nsteps * net overhead"). All-gathers and reduce-scatters then use rings, and all-reduces use rings or trees. On networks
with `half_speed_ranks`, the bytes/s of rings and trees over several nodes decrease with the number of ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2

from shardlab.simulate.hardware.device import CONSTANTS

START: float = CONSTANTS["start"].value
"""Seconds to start a collective."""


@dataclass(frozen=True)
class GroupSpan:
    """Layout of a group on nodes, and the speeds of its members.

    Attributes:
        size: number of ranks.
        nodes: number of nodes over which they are spread.
        members: number of ranks on the node with most of them.
        intra_node: bytes/s that a member sends to members on its node.
        inter_node: bytes/s that a member sends to other nodes: its share of its node's NICs.
        hop_intra_node, hop_inter_node: seconds of a hop inside a node, and of a hop between nodes.
        net_step: minimum seconds of each step of a ring or a tree over several nodes (0: no minimum).
        half_speed_ranks: number of ranks that halves the bytes/s of a ring or a tree over several nodes (0: bytes/s do
            not depend on the number of ranks).
    """

    size: int
    nodes: int
    members: int
    intra_node: float
    inter_node: float
    hop_intra_node: float
    hop_inter_node: float
    net_step: float = 0.0
    half_speed_ranks: float = 0.0

    @property
    def ring(self) -> float:
        """Bytes/s of a ring through all members."""
        crossing = self.members * self.inter_node
        if self.nodes == 1:
            return self.intra_node
        speed = crossing if self.members == 1 else min(self.intra_node, crossing)
        return speed / (1 + self.size / self.half_speed_ranks) if self.half_speed_ranks else speed

    def around(self) -> float:
        """Return the latency in seconds of one round of the ring."""
        return (self.size - self.nodes) * self._step_inside + (self.nodes - 1) * self.hop_inter_node

    def deep(self) -> float:
        """Return the latency in seconds of a tree, from its root to its last leaf.

        The nodes form a binary tree. Inside a node, its members form another one or, if there are several nodes and
        `net_step` is known, NCCL's chain.
        """
        chained = self.net_step and self.nodes > 1
        intra_node_steps = self.members - 1 if chained else steps(self.members)
        return steps(self.nodes) * self.hop_inter_node + intra_node_steps * self._step_inside

    @property
    def _step_inside(self) -> float:
        return max(self.hop_intra_node, self.net_step if self.nodes > 1 else 0.0)


def steps(count: int) -> int:
    """Return the base-2 logarithm of `count`, rounded up: the steps of a binomial tree."""
    return ceil(log2(count)) if count > 1 else 0


def nodes_of(ranks: Sequence[int], per_node: int) -> tuple[int, int]:
    """Return the number of nodes on which some ranks lie, and the largest number of these ranks on one node."""
    return _nodes_of(tuple(ranks), per_node)


@lru_cache(maxsize=1024)
def _nodes_of(ranks: tuple[int, ...], per_node: int) -> tuple[int, int]:
    count = Counter(rank // per_node for rank in ranks)
    return len(count), max(count.values())


def _ring(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of an all_gather or reduce_scatter of `bytes` in total, around a ring."""
    return span.around() + bytes * (span.size - 1) / span.size / span.ring


def _hierarchy(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of an all_gather or reduce_scatter in a hierarchy of nodes."""
    if span.nodes == 1 or span.members == 1:
        return _ring(span, bytes)
    inter_seconds = (span.nodes - 1) * span.hop_inter_node + bytes / span.members * (
        1 - 1 / span.nodes
    ) / span.inter_node
    intra_seconds = (span.members - 1) * span.hop_intra_node + bytes * (1 - 1 / span.members) / span.intra_node
    return inter_seconds + intra_seconds


def _scattering(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of an all_gather or reduce_scatter by the faster way, or by a ring if `net_step` is known."""
    ring = _ring(span, bytes)
    return ring if span.net_step else min(ring, _hierarchy(span, bytes))


def _all_reduce(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of an all_reduce, by reduce_scatter and all_gather or by a tree, whichever is faster."""
    tree = 2 * span.deep() + 2 * bytes / span.ring
    return min(2 * _scattering(span, bytes), tree)


def _rooted(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of a broadcast or reduce, by a pipelined ring or by a binomial tree, whichever is faster."""
    ring = span.around() + bytes / span.ring
    tree = span.deep() + (steps(span.nodes) + steps(span.members)) * bytes / span.ring
    return min(ring, tree)


def _gathering(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of a gather or scatter, whose pieces all pass through links of the root.

    Pieces of other nodes pass through its NIC, while pieces of its own node pass through the link inside the node.
    """
    near = (span.members - 1) / span.size * bytes / span.intra_node if span.members > 1 else 0.0
    far = (span.size - span.members) / span.size * bytes / span.inter_node if span.nodes > 1 else 0.0
    return span.deep() + max(near, far)


def _all_to_all(span: GroupSpan, bytes: float) -> float:
    """Return the seconds of an all_to_all: parts for the same node and for other nodes are sent at the same time."""
    near = span.hop_intra_node + (span.members - 1) / span.size * bytes / span.intra_node if span.members > 1 else 0.0
    far = 0.0
    if span.nodes > 1:
        far = steps(span.nodes) * span.hop_inter_node + (span.size - span.members) / span.size * bytes / span.inter_node
    return max(near, far)


def _barrier(span: GroupSpan, bytes: float) -> float:
    return 2 * span.deep()


COSTS: dict[str, Callable[[GroupSpan, float], float]] = {
    "all_reduce": _all_reduce,
    "all_gather": _scattering,
    "reduce_scatter": _scattering,
    "all_to_all": _all_to_all,
    "broadcast": _rooted,
    "reduce": _rooted,
    "gather": _gathering,
    "scatter": _gathering,
    "barrier": _barrier,
}
"""Costs by the collective's name. Bytes are those of the whole value: the reduced or broadcast tensor, the gathered
result, the scattered input, or one rank's whole input of an all_to_all."""


def collective_seconds(kind: str, bytes: float, span: GroupSpan) -> float:
    """Return the seconds of a collective for a group; 0 for a group of one."""
    return START + COSTS[kind](span, bytes) if span.size > 1 else 0.0
